"""Owns how a scheduler takes over the state of record, and how it writes to a store that may be away (P1, P2)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
from whimbrel.chassis.store import Store
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.records import Record

log = structlog.get_logger()

T = TypeVar("T")

# Between tries while the store is away: at first as fast as a restart of it could be noticed, then sparing.
RETRY_S_MIN = 0.05
RETRY_S_MAX = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a new life starts with: its fencing epoch, and every record as it was last written."""

    epoch: int
    records: tuple[Record, ...]


async def take_over(store: Store) -> Recovered:
    """Take a new epoch, so that an earlier scheduler can write no more, then read what it left. Waits for the store;
    raises ProtocolError when what it holds is not ours."""
    epoch = await persist(store.open, what="opening")
    records = await persist(store.load, what="loading")
    log.info("state_loaded", epoch=epoch, records=len(records))
    return Recovered(epoch=epoch, records=tuple(records))


async def append(store: Store, records: Sequence[Record], *, on_away: Callable[[bool], None]) -> None:
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
