"""Owns a simulated cluster: its machines, their lives, and what is told to the scheduler from outside."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.messages import Message, ModelState, Scaling
from whimbrel.wire.records import ModelRecord

from services.scheduler.core.ready import Ready
from services.scheduler.core.settings import Settings
from services.storage_agent.core.chunks import CheckpointKey
from tests.simulation.agents import GB, SimAgent
from tests.simulation.clock import Clock
from tests.simulation.leases import Lease
from tests.simulation.network import Network
from tests.simulation.peers import SCHEDULER
from tests.simulation.routers import SimRouter
from tests.simulation.schedulers import SimScheduler, ToLeader
from tests.simulation.store import Records
from tests.simulation.streams import SimStream
from tests.simulation.workers import SimWorker

#: How soon an agent learns from the kernel that a worker is gone.
KERNEL_S = 0.002
ASK_S_MAX = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A server: the memory of each GPU slot in bytes, or 0 for slots of a CPU that map models from the pool."""

    pool_bytes: int
    memories: tuple[int, ...]

    def device(self, slot: int) -> str:
        return f"cuda:{slot}" if self.memories[slot] else "cpu"


def a_model(model_id: str, *, partition_bytes: tuple[int, ...], scaling: Scaling) -> ModelRecord:
    return ModelRecord(
        model_id=model_id,
        state=ModelState.READY,
        source=f"/models/{model_id}",
        job_id="",
        checkpoint_digest=f"digest-of-{model_id}",
        size_bytes=sum(partition_bytes),
        parameter_count=sum(partition_bytes) // 2,
        architecture="SimForCausalLM",
        model_config=b"{}",
        created_at_s=0.0,
        keep_alive_s=None,
        scaling=scaling,
        partition_bytes=partition_bytes,
    )


class SimCluster:
    """`check` is called after every durable step of the leader."""

    def __init__(
        self,
        seed: int,
        *,
        machines: dict[str, Machine],
        models: list[ModelRecord],
        routers: int = 2,
        schedulers: int = 2,
        settings: Settings,
        check: Callable[[SimCluster, SimScheduler, Ready], None],
    ) -> None:
        self.clock = Clock(seed)
        self.network = Network(self.clock)
        self.machines = machines
        self.settings = settings
        self.records = Records(lambda: self.clock.now)
        self.catalogue: dict[CheckpointKey, tuple[int, ...]] = {}
        self.schedulers: dict[int, SimScheduler] = {}
        self.agents: dict[str, SimAgent] = {}
        self.workers: dict[tuple[str, int], SimWorker] = {}
        self.routers: dict[str, SimRouter] = {}
        self.streams: list[SimStream] = []
        self.answers: list[Message | WhimbrelError] = []
        self._check = check
        self._leases: dict[str, dict[str, Lease]] = {server_id: {} for server_id in machines}
        self._on_ssd: dict[str, tuple[CheckpointKey, ...]] = {}
        self._ids = itertools.count(1)
        self._epochs = itertools.count(1)
        self._slow: dict[str, float] = {}
        self._steps_of_the_dead = 0
        for model in models:
            key = CheckpointKey(model_id=model.model_id, checkpoint_digest=model.checkpoint_digest)
            self.catalogue[key] = model.partition_bytes or (model.size_bytes,)
        self.records.fill(models)
        ToLeader(self.network, lambda: [s for s in self.schedulers.values() if s.is_leading])
        for number in range(schedulers):
            self.start_scheduler(number)
        for server_id, machine in machines.items():
            self.start_agent(server_id)
            for slot in range(len(machine.memories)):
                self.start_worker(server_id, slot)
        for number in range(routers):
            self.start_router(f"r{number}")

    @property
    def steps(self) -> int:
        """Of all controllers, in all their lives."""
        return self._steps_of_the_dead + sum(scheduler.steps for scheduler in self.schedulers.values())

    @property
    def leader(self) -> SimScheduler | None:
        """The one with the newest epoch, if it lives."""
        leading = [scheduler for scheduler in self.schedulers.values() if scheduler.is_leading]
        return max(leading, key=lambda scheduler: scheduler.epoch, default=None)

    # Lives.

    def start_scheduler(self, number: int) -> None:
        known = self.schedulers.get(number)
        if known is not None:
            assert not known.is_alive
            self._steps_of_the_dead += known.steps
        self.schedulers[number] = SimScheduler(
            self.network,
            number,
            records=self.records,
            settings=self.settings,
            new_id=lambda prefix: f"{prefix}-{next(self._ids)}",
            check=lambda scheduler, ready: self._check(self, scheduler, ready),
        )

    def start_agent(self, server_id: str, *, is_ssd_kept: bool = True) -> None:
        machine = self.machines[server_id]
        self.agents[server_id] = SimAgent(
            self.network,
            server_id,
            epoch=next(self._epochs),
            pool_bytes=machine.pool_bytes,
            devices={slot: machine.device(slot) for slot in range(len(machine.memories))},
            leases=self._leases[server_id],
            catalogue=self.catalogue,
            on_ssd=self._on_ssd.get(server_id, ()) if is_ssd_kept else (),
        )

    def kill_agent(self, server_id: str) -> None:
        self._on_ssd[server_id] = self.agents.pop(server_id).kill()

    def start_worker(self, server_id: str, slot: int) -> None:
        machine = self.machines[server_id]
        self.workers[server_id, slot] = SimWorker(
            self.network,
            server_id,
            slot,
            epoch=next(self._epochs),
            device=machine.device(slot),
            memory_bytes=machine.memories[slot],
            leases=self._leases[server_id],
            token_s=lambda request_id: self._slow[request_id],
        )

    def kill_worker(self, server_id: str, slot: int) -> None:
        worker = self.workers.pop((server_id, slot))
        worker.kill()
        agent = self.agents.get(server_id)
        if agent is not None:
            self.clock.after(KERNEL_S, agent, lambda: agent.worker_exited(slot, worker.epoch))

    def start_router(self, router_id: str) -> None:
        self.routers[router_id] = SimRouter(self.network, router_id, epoch=next(self._epochs))

    def kill_router(self, router_id: str) -> None:
        self.routers.pop(router_id).kill()

    # From outside.

    def request(self, router_id: str, model_id: str, *, tokens: int, token_s: float) -> SimStream:
        request_id = f"q{len(self.streams)}"
        self._slow[request_id] = token_s
        stream = self.routers[router_id].request(request_id, model_id, tokens)
        self.streams.append(stream)
        return stream

    def ask(self, router_id: str, message: Message) -> None:
        """Somebody asks the scheduler by way of a router; the answer is kept in `answers`."""
        router = self.routers[router_id]

        async def asking() -> None:
            try:
                answer: Message | WhimbrelError = await self.network.request(router, SCHEDULER, message, ASK_S_MAX)
            except WhimbrelError as error:
                answer = error
            self.answers.append(answer)

        router.spawn(asking())


__all__ = ["GB", "Machine", "SimCluster", "a_model"]
