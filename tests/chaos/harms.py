"""What is done to a victim, and how it is taken back."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass

from tests.chaos.matrix import Victim, Way
from tests.chaos.world import World

# Longer than heartbeats may be missed (3.5 s), than a lease (2 s) and than a handover waits (2.5 s), so that whoever
# comes back finds that others have gone on without it.
PAUSE_S = 4.0


@dataclass(frozen=True, slots=True)
class Harm:
    """To processes, by their names in the cluster, or to the router's connection."""

    world: World
    way: Way
    processes: tuple[str, ...]

    async def begin(self) -> None:
        match self.way:
            case Way.KILL:
                self._signal(signal.SIGKILL)
            case Way.PAUSE:
                self._signal(signal.SIGSTOP)
            case Way.CUT:
                assert self.world.proxy is not None
                await self.world.proxy.go_away()

    async def rest(self) -> None:
        """What follows the beginning; returns when the harm is over."""
        match self.way:
            case Way.PAUSE:
                await asyncio.sleep(PAUSE_S)
                self._signal(signal.SIGCONT)
            case Way.CUT:
                assert self.world.proxy is not None
                await asyncio.sleep(PAUSE_S)
                await self.world.proxy.come()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            os.kill(self.world.pid(process), number)


async def aim(world: World, victim: Victim, way: Way, *, source: str, destination: str) -> Harm:
    """The harm, ready to begin."""
    processes: dict[Victim, tuple[str, ...]] = {
        Victim.SOURCE_WORKER: (f"worker-{source}-0",),
        Victim.DESTINATION_WORKER: (f"worker-{destination}-0",),
        Victim.SOURCE_AGENT: (f"agent-{source}",),
        Victim.DESTINATION_AGENT: (f"agent-{destination}",),
        Victim.SOURCE_SERVER: (f"agent-{source}", f"worker-{source}-0"),
        Victim.NATS: ("nats-server",),
        Victim.REDIS: ("redis-server",),
        Victim.ROUTER: ("router",),
        Victim.CONNECTION: ("router",),
    }
    return Harm(world, way, (await world.leader(),) if victim is Victim.LEADER else processes[victim])
