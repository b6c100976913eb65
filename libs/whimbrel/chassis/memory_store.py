"""Owns the in-memory twin of the Redis store, held to the same contract by the same tests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from whimbrel.chassis.store import JOURNAL_ENTRIES_MAX, TABLES, decode_value
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


class InMemoryStore:
    """A store on `data`; give the same data to another store to be a second opener, or the next life of the first.

    `data.is_up = False` makes every call Unavailable; `data.journal` holds the records of each step, latest last.
    """

    def __init__(self, data: InMemoryData | None = None) -> None:
        self.data = InMemoryData() if data is None else data
        self._epoch = 0

    async def open(self) -> int:
        self._reach()
        self.data.epoch += 1
        self._epoch = self.data.epoch
        return self._epoch

    async def append(self, records: Sequence[Record]) -> None:
        assert self._epoch, "open the store before appending"
        if not records:
            return
        encoded = [codec.encode_record(record) for record in records]
        self._reach()
        if self._epoch != self.data.epoch:
            raise StaleEpoch(epoch=self._epoch, current_epoch=self.data.epoch)
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

    def _reach(self) -> None:
        if not self.data.is_up:
            raise Unavailable(what="Redis")
