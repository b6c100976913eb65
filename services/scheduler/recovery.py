"""Owns how a scheduler takes over the state of record, and how it writes to a store that may be away (P1, P2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
from whimbrel.chassis.store import Claim, Store
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.records import Forget, ModelRecord, Record

log = structlog.get_logger()

T = TypeVar("T")

# Between tries while the store is away: at first as fast as a restart of it could be noticed, then sparing.
RETRY_S_MIN = 0.05
RETRY_S_MAX = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a leader knew when the store lost its data: every record, as of the end of its epoch."""

    epoch: int
    records: tuple[Record, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a new life starts with. `is_emptied`: nothing is known of any model, although there may be some."""

    records: tuple[Record, ...]
    is_emptied: bool


async def take_over(store: Store, claim: Claim, memory: Memory | None = None) -> Recovered:
    """Read what the last leader left, or, when the store knows less than we do, write down what we know.

    Waits for the store; raises ProtocolError when what it holds is not ours, StaleEpoch when somebody else took over.
    """
    records = tuple(await persist(store.load, what="loading"))
    if memory is not None and claim.found_epoch < memory.epoch:
        known = {(record.table, record.key()) for record in memory.records}
        wrong = [record for record in records if (record.table, record.key()) not in known]
        forgets = [Forget(forgotten_table=record.table, forgotten_key=record.key()) for record in wrong]
        await append(store, [*forgets, *memory.records])
        log.warning("state_written_back", epoch=claim.epoch, records=len(memory.records), removed=len(forgets))
        return Recovered(records=memory.records, is_emptied=False)
    log.info("state_loaded", epoch=claim.epoch, records=len(records))
    return Recovered(records=records, is_emptied=not any(isinstance(record, ModelRecord) for record in records))


async def append(
    store: Store, records: Sequence[Record], *, on_away: Callable[[bool], None] = lambda is_away: None
) -> None:
    """Returns when the records are durable, however long the store is away; `on_away` hears when it is and when it is
    back. Raises StaleEpoch when another scheduler took over."""
    if records:
        await persist(lambda: store.append(records), what="appending", on_away=on_away)


async def persist(
    work: Callable[[], Awaitable[T]], *, what: str, on_away: Callable[[bool], None] = lambda is_away: None
) -> T:
    """Do it again until the store is there."""
    retry_s = RETRY_S_MIN
    is_away = False
    while True:
        try:
            result = await work()
        except Unavailable as error:
            if not is_away:
                log.warning("store_away", what=what, reason=str(error))
            is_away = True
            on_away(True)
            await asyncio.sleep(retry_s)
            retry_s = min(RETRY_S_MAX, 2.0 * retry_s)
        else:
            if is_away:
                log.info("store_back", what=what)
                on_away(False)
            return result
