"""One-way messages: in order, never waited for, dropped when too many wait or the bus is away for long."""

from __future__ import annotations

import asyncio

import pytest
from whimbrel.chassis.bus import Received
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire.messages import AbortInference, CancelPlacement, Message

from services.router import notes as module
from services.router.notes import Notes


def a_note(number: int) -> CancelPlacement:
    return CancelPlacement(request_id=f"req-{number}", model_id="tiny")


async def said_by(notes: Notes, hub: InMemoryHub) -> list[Message]:
    """Everything that leaves until the notes are closed and empty."""
    heard: list[Message] = []

    async def note(received: Received) -> None:
        heard.append(received.message)

    listener = hub.bus(name="listener")
    await listener.subscribe("wb.cmd.>", note)
    notes.close()
    await asyncio.wait_for(notes.run(), 10)
    await listener.drain()
    return heard


async def test_notes_leave_in_the_order_in_which_they_were_told() -> None:
    hub = InMemoryHub()
    notes = Notes(hub.bus())
    abort = AbortInference(request_id="req-9", epoch=1)
    notes.tell_scheduler(a_note(1))
    notes.tell_worker(("server-0", 0), abort)
    notes.tell_scheduler(a_note(2))
    assert await said_by(notes, hub) == [a_note(1), abort, a_note(2)]


async def test_the_newest_are_dropped_when_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NOTES_MAX", 3)
    hub = InMemoryHub()
    notes = Notes(hub.bus())
    for number in range(5):
        notes.tell_scheduler(a_note(number))
    assert await said_by(notes, hub) == [a_note(0), a_note(1), a_note(2)]


async def test_nothing_is_taken_after_the_end_and_nobody_fails() -> None:
    hub = InMemoryHub()
    notes = Notes(hub.bus())
    notes.close()
    notes.tell_scheduler(a_note(1))
    assert await said_by(notes, hub) == []


async def test_a_bus_that_refuses_costs_the_note_and_nothing_else() -> None:
    hub = InMemoryHub(max_payload_bytes=100)
    notes = Notes(hub.bus())
    notes.tell_scheduler(CancelPlacement(request_id="req-" + "x" * 200, model_id="tiny"))
    notes.tell_scheduler(a_note(2))
    assert await said_by(notes, hub) == [a_note(2)]
