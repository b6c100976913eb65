"""The inbox: bounded, ordered, batched."""

from __future__ import annotations

import asyncio
import random

import pytest
from whimbrel.chassis.inbox import Inbox
from whimbrel.wire.errors import QueueFull, Unavailable


async def read_all(inbox: Inbox[int], batch_max: int = 100) -> list[list[int]]:
    return [batch async for batch in inbox.batches(batch_max)]


async def test_a_batch_holds_everything_that_is_there_up_to_its_bound() -> None:
    inbox: Inbox[int] = Inbox(10)
    for n in range(7):
        inbox.put_nowait(n)
    inbox.close()

    assert await read_all(inbox, 3) == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(inbox) == 0


async def test_a_full_inbox_refuses_with_its_name_and_bound() -> None:
    inbox: Inbox[int] = Inbox(2, name="events of s1")
    inbox.put_nowait(1)
    inbox.put_nowait(2)

    with pytest.raises(QueueFull) as full:
        inbox.put_nowait(3)

    assert (full.value.queue, full.value.limit) == ("events of s1", 2)
    assert len(inbox) == 2


async def test_the_reader_waits_for_the_first_item() -> None:
    inbox: Inbox[int] = Inbox(2)
    reading = asyncio.ensure_future(anext(inbox.batches(2)))
    await asyncio.sleep(0)
    assert not reading.done()

    inbox.put_nowait(1)

    assert await reading == [1]


async def test_putters_wait_in_line_for_room() -> None:
    inbox: Inbox[int] = Inbox(1)
    await inbox.put(0)
    putting = [asyncio.ensure_future(inbox.put(n)) for n in (1, 2, 3)]
    await asyncio.sleep(0)
    assert len(inbox) == 1
    batches = inbox.batches(10)

    read = [await anext(batches) for _ in range(4)]

    assert read == [[0], [1], [2], [3]]
    await asyncio.gather(*putting)


async def test_a_putter_that_gives_up_leaves_the_line() -> None:
    inbox: Inbox[int] = Inbox(1)
    await inbox.put(0)
    impatient, patient = asyncio.ensure_future(inbox.put(1)), asyncio.ensure_future(inbox.put(2))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    batches = inbox.batches(10)

    assert [await anext(batches) for _ in range(2)] == [[0], [2]]
    await patient


async def test_a_closed_inbox_takes_nothing_and_gives_what_it_has() -> None:
    inbox: Inbox[int] = Inbox(1)
    await inbox.put(0)
    waiting = asyncio.ensure_future(inbox.put(1))
    await asyncio.sleep(0)

    inbox.close()

    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        inbox.put_nowait(2)
    with pytest.raises(Unavailable):
        await inbox.put(2)
    assert await read_all(inbox) == [[0]]


async def test_closing_ends_a_reader_that_waits() -> None:
    inbox: Inbox[int] = Inbox(1)
    reading = asyncio.ensure_future(read_all(inbox))
    await asyncio.sleep(0)

    inbox.close()
    inbox.close()

    assert await reading == []


@pytest.mark.parametrize("seed", range(20))
async def test_nothing_is_lost_or_reordered_whatever_the_interleaving(seed: int) -> None:
    chance = random.Random(seed)
    inbox: Inbox[tuple[int, int]] = Inbox(chance.randint(1, 5))
    read: list[tuple[int, int]] = []

    async def put(who: int) -> None:
        for n in range(50):
            if chance.random() < 0.3:
                await asyncio.sleep(0)
            await inbox.put((who, n))

    async def take() -> None:
        async for batch in inbox.batches(chance.randint(1, 8)):
            assert batch
            read.extend(batch)
            if chance.random() < 0.5:
                await asyncio.sleep(0)

    taking = asyncio.ensure_future(take())
    await asyncio.gather(*(put(who) for who in range(4)))
    inbox.close()
    await taking

    assert all([n for w, n in read if w == who] == list(range(50)) for who in range(4)), f"seed {seed}"
