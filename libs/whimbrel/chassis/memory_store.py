"""Owns the in-memory twin of the Redis store, held to the same contract by the same tests."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from whimbrel.chassis.store import JOURNAL_ENTRIES_MAX, TABLES, Claim, decode_value
from whimbrel.wire import codec
from whimbrel.wire.errors import StaleEpoch, Unavailable
from whimbrel.wire.records import Forget, Record


@dataclass(slots=True)
class InMemoryData:
    """What a Redis server holds of one cluster: shared by the stores that are open on it."""

    epoch: int = 0
    tables: dict[str, dict[str, bytes]] = field(default_factory=lambda: {table: {} for table in TABLES})
    journal: deque[tuple[Record, ...]] = field(default_factory=lambda: deque(maxlen=JOURNAL_ENTRIES_MAX))
    is_up: bool = True
    leader: str = ""
    lease_until_s: float = 0.0
    clock: Callable[[], float] = time.monotonic

    @property
    def lease_left_s(self) -> float:
        return max(0.0, self.lease_until_s - self.clock()) if self.leader else 0.0

    def lose(self) -> None:
        """Everything is gone, as after FLUSHALL."""
        self.epoch, self.leader = 0, ""
        self.journal.clear()
        for table in self.tables.values():
            table.clear()


class InMemoryStore:
    """A store on `data`; give the same data to another store to be a second opener, or the next life of the first.

    `data.is_up = False` makes every call Unavailable; `data.journal` holds the records of each step, latest last.
    """

    def __init__(self, data: InMemoryData | None = None) -> None:
        self.data = InMemoryData() if data is None else data
        self._epoch = 0

    async def open(self) -> int:
        self._reach()
        self._epoch = self.data.epoch = max(self.data.epoch, self._epoch) + 1
        return self._epoch

    async def acquire(self, name: str, ttl_s: float, *, newest_epoch: int = 0) -> Claim:
        self._reach()
        found, left_s = self.data.epoch, self.data.lease_left_s
        if left_s > 0.0:
            return Claim(epoch=0, found_epoch=found, leader=self.data.leader, left_s=left_s)
        if found < newest_epoch:
            return Claim(epoch=0, found_epoch=found, leader="", left_s=0.0)
        self._hold(name, ttl_s)
        return Claim(epoch=await self.open(), found_epoch=found, leader=name, left_s=ttl_s)

    async def renew(self, name: str, ttl_s: float) -> None:
        assert self._epoch, "acquire the lease before renewing it"
        self._reach()
        self._check()
        self._hold(name, ttl_s)

    async def release(self) -> None:
        self._reach()
        if self._epoch == self.data.epoch:
            self.data.leader = ""

    async def append(self, records: Sequence[Record]) -> None:
        assert self._epoch, "open the store before appending"
        if not records:
            return
        encoded = [codec.encode_record(record) for record in records]
        self._reach()
        self._check()
        for record, value in zip(records, encoded, strict=True):
            if isinstance(record, Forget):
                self.data.tables[record.forgotten_table].pop(record.key(), None)
            else:
                self.data.tables[record.table][record.key()] = value
        self.data.journal.append(tuple(records))

    async def load(self) -> list[Record]:
        self._reach()
        return [
            decode_value(table, key, value)
            for table, values in self.data.tables.items()
            for key, value in values.items()
        ]

    async def close(self) -> None:
        self._epoch = 0

    def _hold(self, name: str, ttl_s: float) -> None:
        self.data.leader, self.data.lease_until_s = name, self.data.clock() + ttl_s

    def _check(self) -> None:
        if self._epoch != self.data.epoch:
            raise StaleEpoch(epoch=self._epoch, current_epoch=self.data.epoch)

    def _reach(self) -> None:
        if not self.data.is_up:
            raise Unavailable(what="Redis")
