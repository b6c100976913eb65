"""Owns the inbox: a service's single bounded queue of events, read in batches by one consumer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from whimbrel.wire.errors import QueueFull, Unavailable

T = TypeVar("T")


class Inbox(Generic[T]):
    """At most `events_max` items. All methods belong to the thread of the event loop."""

    def __init__(self, events_max: int, *, name: str = "inbox") -> None:
        assert events_max > 0
        self._events_max = events_max
        self._name = name
        self._items: deque[T] = deque()
        self._readable = asyncio.Event()
        # Those that wait for room, with what they want to put: whoever makes room puts it for them, so order holds.
        self._waiting: deque[tuple[asyncio.Future[None], T]] = deque()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._items)

    def put_nowait(self, item: T) -> None:
        """Add an item; raises QueueFull when there is no room, Unavailable after `close`."""
        self._refuse_when_closed()
        if len(self._items) >= self._events_max:
            raise QueueFull(queue=self._name, limit=self._events_max)
        self._add(item)

    async def put(self, item: T) -> None:
        """Add an item, waiting in line for room; raises Unavailable when the inbox is or gets closed."""
        self._refuse_when_closed()
        if len(self._items) < self._events_max:
            self._add(item)
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((admitted, item))
        await admitted

    async def batches(self, batch_max: int) -> AsyncIterator[list[T]]:
        """Everything that is there, at most `batch_max` at a time, in order; ends when closed and empty."""
        assert batch_max > 0
        while True:
            await self._readable.wait()
            if not self._items:
                return
            batch = [self._items.popleft() for _ in range(min(batch_max, len(self._items)))]
            self._admit()
            if not self._items and not self._is_closed:
                self._readable.clear()
            yield batch

    def close(self) -> None:
        """Take nothing more; whoever waits to put is refused, and what is inside can still be read."""
        self._is_closed = True
        self._readable.set()
        while self._waiting:
            admitted, _ = self._waiting.popleft()
            if not admitted.done():
                admitted.set_exception(self._closed())

    def _add(self, item: T) -> None:
        self._items.append(item)
        self._readable.set()

    def _admit(self) -> None:
        while self._waiting and len(self._items) < self._events_max:
            admitted, item = self._waiting.popleft()
            if not admitted.done():  # a cancelled one has left the line
                admitted.set_result(None)
                self._add(item)

    def _refuse_when_closed(self) -> None:
        if self._is_closed:
            raise self._closed()

    def _closed(self) -> Unavailable:
        return Unavailable(what=f"{self._name} (it is closed)")
