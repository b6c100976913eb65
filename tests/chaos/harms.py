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
    """To one process, by its name in the cluster, or to the router's connection."""

    world: World
    way: Way
    process: str

    async def begin(self) -> None:
        match self.way:
            case Way.KILL:
                os.kill(self.world.pid(self.process), signal.SIGKILL)
            case Way.PAUSE:
                os.kill(self.world.pid(self.process), signal.SIGSTOP)
            case Way.CUT:
                assert self.world.proxy is not None
                await self.world.proxy.go_away()

    async def rest(self) -> None:
        """What follows the beginning; returns when the harm is over."""
        match self.way:
            case Way.PAUSE:
                await asyncio.sleep(PAUSE_S)
                os.kill(self.world.pid(self.process), signal.SIGCONT)
            case Way.CUT:
                assert self.world.proxy is not None
                await asyncio.sleep(PAUSE_S)
                await self.world.proxy.come()


async def aim(world: World, victim: Victim, way: Way, *, source: str, destination: str) -> Harm:
    """The harm, ready to begin."""
    process = {
        Victim.SOURCE_WORKER: f"worker-{source}-0",
        Victim.DESTINATION_WORKER: f"worker-{destination}-0",
        Victim.SOURCE_AGENT: f"agent-{source}",
        Victim.DESTINATION_AGENT: f"agent-{destination}",
        Victim.NATS: "nats-server",
        Victim.REDIS: "redis-server",
        Victim.ROUTER: "router",
        Victim.CONNECTION: "router",
    }
    return Harm(world, way, await world.leader() if victim is Victim.LEADER else process[victim])
