"""Owns the store of a simulated cluster: the in-memory one with its fencing, called without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from whimbrel.chassis.memory_store import InMemoryData, InMemoryStore
from whimbrel.wire.records import Forget, Record

T = TypeVar("T")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as those of the in-memory store."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    raise AssertionError("it waits for something")


class Records:
    """The store of the cluster: `data` is what it holds; `mirror` the same, record by record, kept beside it so that it
    can be compared with the leader's state after every step."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.data = InMemoryData(clock=clock)
        self.mirror: dict[tuple[str, str], Record] = {}

    def fill(self, records: Sequence[Record]) -> None:
        """What an earlier life left."""
        store = InMemoryStore(self.data)
        at_once(store.open())
        self.append(store, records)

    def append(self, store: InMemoryStore, records: Sequence[Record]) -> None:
        """Raises Unavailable, StaleEpoch."""
        at_once(store.append(records))
        for record in records:
            if isinstance(record, Forget):
                self.mirror.pop((record.forgotten_table, record.forgotten_key), None)
            else:
                self.mirror[record.table, record.key()] = record
