"""One cell: a request runs, its instance is moved, the harm comes in the wanted state, and everything is looked at."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

from whimbrel.client import ApiError
from whimbrel.client.admin import MIGRATION_ENDS

from tests.chaos.client import MODEL, Client, numbered
from tests.chaos.harms import Harm, aim
from tests.chaos.matrix import Cell, Result, State, Victim, Way
from tests.chaos.timeline import Timeline
from tests.chaos.world import AWAY, World, settle

# A word takes 0.04 s. Where the answer goes on through the harm it takes longer, so that there is something left to
# move afterwards.
WORDS, WORDS_THROUGH_A_HARM = 80, 130
# What it may lose besides is a pause, a failover after ten silent seconds, and a load.
STREAM_S_MAX = 40.0
# A migration in which nothing moves is given up after ten seconds, or two of these when its leader changes.
MIGRATION_S_MAX = 25.0
# A process that was killed is back in some seconds; an idle instance goes half a second after its last request.
REST_S_MAX = 30.0
# Each step on the way to the wanted state takes about a second.
STATE_S_MAX = 15.0
QUEUED_PROMPT = "the one that waits for its turn"
LAST_PROMPT = "and one more"
# Killed and soon there again, these are to cost a migration time, and not its end; NATS also when it stands still: who
# can't hear takes nobody for lost.
AIDES = (Victim.SOURCE_AGENT, Victim.DESTINATION_AGENT, Victim.LEADER, Victim.NATS, Victim.REDIS)


class NotReached(Exception):
    """The cell could not be set up."""


async def run_cell(world: World, cell: Cell, *, late_s: float = 0.0) -> Result:
    """The harm comes `late_s` after the news of the state."""
    began_s = time.monotonic()
    is_flowing = cell.state is not State.ENDED and cell.victim not in (Victim.SOURCE_WORKER, Victim.SOURCE_SERVER)
    client = Client(world.url, numbered(WORDS_THROUGH_A_HARM if is_flowing else WORDS)).start()
    queued = Client(world.url, QUEUED_PROMPT)
    attempt = _Attempt(world, cell, client, queued, late_s)
    try:
        await attempt.run()
    except (*AWAY, NotReached, RuntimeError) as error:
        attempt.faults.append(f"the cell broke: {error!r}")
    finally:
        await asyncio.gather(client.leave(), queued.leave())
    return Result(
        cell=cell,
        struck=attempt.struck,
        end=attempt.end,
        cause=attempt.cause,
        end_s=attempt.end_s,
        longest_pause_s=client.longest_pause_s,
        is_cut_short=client.is_cut_short,
        seconds=time.monotonic() - began_s,
        faults=tuple(attempt.faults),
    )


class _Attempt:
    """`client` runs while the migration goes on, `queued` waits on the same instance for its turn."""

    def __init__(self, world: World, cell: Cell, client: Client, queued: Client, late_s: float) -> None:
        self.faults: list[str] = []
        self.struck = ""
        self.end = self.cause = ""
        self.end_s = 0.0
        self._world = world
        self._cell = cell
        self._client = client
        self._queued = queued
        self._late_s = late_s
        self._migration_id = ""
        self._struck_s = 0.0

    async def run(self) -> None:
        await self._client.until_text()
        source = await self._world.where()
        if not source:
            raise NotReached(f"no request runs: {self._client.outcome()}")
        self._queued.start()
        destination = "s1" if source == "s0" else "s0"
        if self._cell.victim is Victim.DESTINATION_AGENT:
            # From the SSD a load takes longer than the news of it.
            with contextlib.suppress(ApiError):
                await self._world.admin.evict(destination, MODEL, "dram")
        harm = await aim(self._world, self._cell.victim, self._cell.way, source=source, destination=destination)
        self._migration_id = (await self._world.admin.migrate(MODEL, destination))["migration_id"]
        await self._strike(harm)
        await self._check_streams()
        await self._check_migration()
        await self._check_next_request()
        self.faults += [f"left: {what}" for what in await settle(self._world, REST_S_MAX)]

    async def _strike(self, harm: Harm) -> None:
        async with self._in_state(harm):
            await asyncio.sleep(self._late_s)
            self._struck_s = time.time()
            await harm.begin()
        await harm.rest()

    @contextlib.asynccontextmanager
    async def _in_state(self, harm: Harm) -> AsyncIterator[None]:
        """The migration is in the wanted state. A handover lasts milliseconds: for it the router, which has to switch,
        is held from the state before until the harm has begun."""
        if self._cell.state is not State.HANDOVER:
            await self._until(self._cell.state)
            yield
            return
        await self._until(State.RESUMING)
        router = self._world.pid("router")
        os.kill(router, signal.SIGSTOP)
        try:
            await self._until(State.HANDOVER)
            yield
        finally:
            is_paused_itself = "router" in harm.processes and harm.way is Way.PAUSE
            if not is_paused_itself:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(router, signal.SIGCONT)

    async def _until(self, state: State) -> None:
        assert self._world.watch is not None
        try:
            await self._world.watch.until(self._migration_id, state, STATE_S_MAX)
        except TimeoutError:
            raise NotReached(f"it was never {state}: {self._timeline.entered}") from None

    @property
    def _timeline(self) -> Timeline:
        assert self._world.watch is not None
        return self._world.watch.of(self._migration_id)

    async def _check_streams(self) -> None:
        is_router_dead = (self._cell.victim, self._cell.way) == (Victim.ROUTER, Way.KILL)
        for name, client in (("stream", self._client), ("queued stream", self._queued)):
            if not await client.end(STREAM_S_MAX):
                self.faults.append(f"the {name} does not end: {client.outcome()}")
            elif not client.is_whole and not (is_router_dead and client.is_cut_short):
                self.faults.append(f"the {name} ended wrong: {client.outcome()}")

    async def _check_migration(self) -> None:
        """Over when its end was said, or nobody knows it any more: those that ended are forgotten with their leader."""
        deadline_s = self._struck_s + MIGRATION_S_MAX
        while not self._timeline.end and (live := await self._live_state()):
            if time.time() > deadline_s:
                self.faults.append(f"the migration hangs: {live} since {self._timeline.entered}")
                break
            await asyncio.sleep(0.1)
        assert self._world.watch is not None
        await self._world.watch.read_back(self._migration_id)
        self.end, self.cause = self._timeline.end or "over", self._timeline.cause
        is_to_go_on = (self._cell.victim in AIDES and self._cell.way is Way.KILL) or self._cell.victim is Victim.NATS
        if is_to_go_on and self.end not in ("finished", "over"):
            self.faults.append(f"the migration was {self.end} for that: {self.cause}")
        self.end_s = max(0.0, self._timeline.entered.get(self.end, time.time()) - self._struck_s)
        self.struck = self._timeline.state_at(self._struck_s)

    async def _live_state(self) -> str:
        """The state of a migration that goes on; "" when it does not."""
        try:
            listed = await self._world.admin.migrations()
        except AWAY as error:
            return f"unknown ({error!r})"
        states = [one["state"] for one in listed if one["migration_id"] == self._migration_id]
        return next((state for state in states if state not in MIGRATION_ENDS), "")

    async def _check_next_request(self) -> None:
        deadline_s = time.monotonic() + REST_S_MAX
        while True:
            following = Client(self._world.url, LAST_PROMPT).start()
            await following.end(REST_S_MAX)
            await following.leave()
            if following.is_whole:
                return
            # A router that was killed takes a moment to listen again.
            if time.monotonic() > deadline_s or not following.cut:
                self.faults.append(f"the next request was not served: {following.outcome()}")
                return
            await asyncio.sleep(0.2)
