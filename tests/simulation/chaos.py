"""Owns a random life of a simulated cluster: what its users ask for, and everything that goes wrong meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import CordonServer, DeleteModel, DeployModel, ScaleModel, Scaling, UncordonServer

from services.gpu_worker.core.instance import Work
from services.scheduler.core.settings import Settings
from tests.simulation.cluster import GB, Machine, SimCluster, a_model
from tests.simulation.invariants import check_rest, check_step
from tests.simulation.network import NO_FAULTS, Faults
from tests.simulation.schedulers import Boundary
from tests.simulation.streams import SimStream

FAULTS = Faults(lost=0.02, doubled=0.02, late=0.03)
#: With no faults and every model asked for, nobody waits longer: a turn of everybody else before it, on one slot.
WAIT_S_MAX = 60.0
#: Long enough for a drain and a load, and much shorter than one model asks for all slots.
HOG_WAIT_S_MAX = 15.0
HOG_SLOTS_MAX = 3
SETTINGS = Settings(keep_alive_s=5.0, fair_wait_s=1.0, load_stall_s=8.0)


class Life:
    """One seed. `live` makes trouble for about so many steps, then asks for order and checks that it comes."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = chance = random.Random(f"life {seed}")
        self.machines = _machines(chance)
        self.model_ids = [f"m{k}" for k in range(chance.randint(3, 6))]
        models = [
            a_model(
                model_id,
                partition_bytes=tuple([GB // chance.randint(4, 12)] * self._partitions()),
                scaling=Scaling(max_instances=chance.choice([1, 1, 2, 3]), target_concurrency=chance.choice([1, 2, 8])),
            )
            for model_id in self.model_ids
        ]
        policy = chance.choice(["migration", "migration", "migration", "preemption", "availability"])
        settings = replace(SETTINGS, policy=policy)
        self.sim = SimCluster(seed, machines=self.machines, models=models, settings=settings, check=check_step)
        self.deploys = 0
        self.actions: list[tuple[int, Callable[[], None]]] = [
            (60, self._request),
            (6, self._leave),
            (5, self._end_worker),
            (4, self._end_agent),
            (3, self._end_router),
            (4, self._cut_scheduler),
            (2, self._end_scheduler),
            (2, self._end_store),
            (3, self._cut_off),
            (4, self._break),
            (4, self._take_out),
            (5, self._scale),
            (2, self._delete_or_deploy),
        ]

    def _partitions(self) -> int:
        most = max(sum(memory > 0 for memory in machine.memories) for machine in self.machines.values())
        return 2 if most >= 2 and self.chance.random() < 0.3 else 1

    def live(self, steps: int) -> None:
        sim, chance = self.sim, self.chance
        sim.clock.run(2.5)
        weights = [weight for weight, _ in self.actions]
        while sim.steps < steps:
            sim.network.faults = chance.choice([NO_FAULTS, FAULTS, FAULTS])
            chance.choices([act for _, act in self.actions], weights)[0]()
            sim.clock.run(chance.choice([0.0, 0.01, 0.2, 1.0]))
        self._restore_order()
        self._ask_all()
        self._hog()
        self._end()

    # Trouble.

    def _request(self) -> None:
        router_id = self.chance.choice(sorted(self.sim.routers))
        tokens, token_s = self.chance.choice([(2, 0.02), (4, 0.1), (5, 0.6)])
        self.sim.request(router_id, self.chance.choice(self.model_ids), tokens=tokens, token_s=token_s)

    def _leave(self) -> None:
        streams = [stream for router in self.sim.routers.values() for stream in router.streams.values()]
        if streams:
            self.chance.choice(streams).leave()

    def _end_worker(self) -> None:
        sim, (server_id, slot) = self.sim, self.chance.choice(sorted(self.sim.workers))
        sim.kill_worker(server_id, slot)
        self._later(lambda: sim.start_worker(server_id, slot))

    def _end_agent(self) -> None:
        if self.sim.agents:
            server_id, is_ssd_kept = self.chance.choice(sorted(self.sim.agents)), self.chance.random() < 0.7
            self.sim.kill_agent(server_id)
            self._later(lambda: self.sim.start_agent(server_id, is_ssd_kept=is_ssd_kept))

    def _end_router(self) -> None:
        router_id = self.chance.choice(sorted(self.sim.routers))
        self.sim.kill_router(router_id)
        self._later(lambda: self.sim.start_router(router_id))

    def _cut_scheduler(self) -> None:
        """At a boundary of its next step: it dies, or stands still until another one leads, and goes on."""
        leader = self.sim.leader
        if leader is not None:
            leader.boundary = self.chance.choice(list(Boundary))
            leader.pause_s = self.chance.choice([0.0, 0.0, 1.0, 4.0])

    def _end_scheduler(self) -> None:
        self.chance.choice(list(self.sim.schedulers.values())).kill()

    def _end_store(self) -> None:
        data = self.sim.records.data
        data.is_up = False
        self.sim.clock.run(self.chance.choice([0.1, 1.0, 5.0]))
        data.is_up = True

    def _cut_off(self) -> None:
        """Alive, and heard by nobody."""
        sim = self.sim
        process = self.chance.choice([*sim.agents.values(), *sim.workers.values(), *sim.routers.values()])
        process.cut_until_s = sim.clock.now + self.chance.choice([0.5, 2.0, 6.0])

    def _break(self) -> None:
        if self.chance.random() < 0.5 and self.sim.agents:
            agent = self.sim.agents[self.chance.choice(sorted(self.sim.agents))]
            agent.errors.append(Unavailable(what="the disk"))
        else:
            worker = self.sim.workers[self.chance.choice(sorted(self.sim.workers))]
            worker.failures.append(self.chance.choice([Work.BUILD, Work.BIND, Work.ACTIVATE]))

    def _take_out(self) -> None:
        server_id, is_back = self.chance.choice(sorted(self.machines)), self.chance.random() < 0.5
        is_drained = self.chance.random() < 0.5
        self._ask(
            UncordonServer(server_id=server_id) if is_back else CordonServer(server_id=server_id, drain=is_drained)
        )

    def _scale(self) -> None:
        most = self.chance.choice([1, 2, 4])
        self._ask(
            ScaleModel(
                model_id=self.chance.choice(self.model_ids),
                min_instances=self.chance.choice([0, 0, 0, 1]),
                max_instances=most,
                target_concurrency=self.chance.choice([1, 2, 8]),
                keep_alive_s=self.chance.choice([None, 0.5, 5.0]),
            )
        )

    def _delete_or_deploy(self) -> None:
        model_id = self.chance.choice(self.model_ids)
        if self.chance.random() < 0.4:
            self._ask(DeleteModel(model_id=model_id))
        self.deploys += 1
        self._ask(DeployModel(model_id=model_id, source=f"/models/{model_id}/{self.deploys}"))

    def _ask(self, message: CordonServer | UncordonServer | ScaleModel | DeleteModel | DeployModel) -> None:
        self.sim.ask(self.chance.choice(sorted(self.sim.routers)), message)

    def _later(self, begin: Callable[[], None]) -> None:
        """The next life of something, after a moment or so long that everybody noticed."""
        self.sim.clock.run(self.chance.choice([0.0, 0.3, 6.0]))
        begin()
        dead = [number for number, scheduler in self.sim.schedulers.items() if not scheduler.is_alive]
        for number in dead:
            self.sim.start_scheduler(number)

    # Order.

    def _restore_order(self) -> None:
        sim = self.sim
        sim.network.faults = NO_FAULTS
        for number, scheduler in list(sim.schedulers.items()):
            scheduler.boundary = None
            if not scheduler.is_alive:
                sim.start_scheduler(number)
        for agent in sim.agents.values():
            agent.errors.clear()
        for worker in sim.workers.values():
            worker.failures.clear()
        sim.clock.run(12.0)
        self._check_counts()
        for _ in range(2):
            for server_id in self.machines:
                self._ask(UncordonServer(server_id=server_id))
            for model_id in self.model_ids:
                self._ask(DeployModel(model_id=model_id, source=f"/models/{model_id}/last"))
                self._ask(ScaleModel(model_id=model_id, min_instances=0, max_instances=1, keep_alive_s=1.0))
            sim.clock.run(8.0)

    def _ask_all(self) -> None:
        """Every model is asked for by several at once: all are served, and nobody is forgotten."""
        sim = self.sim
        born = [self._ask_for(model_id) for model_id in self.model_ids for _ in range(3)]
        sim.clock.run(WAIT_S_MAX)
        older = [stream for stream in sim.streams if not stream.is_over and stream not in born]
        assert not older, f"{[s.request.request_id for s in older]} from before are forgotten ({self._states(older)})"
        self._check_served(born)

    def _hog(self) -> None:
        """One model keeps every slot busy all the time, and doesn't keep another from its turn."""
        slots = sum(len(machine.memories) for machine in self.machines.values())
        if slots > HOG_SLOTS_MAX:
            return
        hog, other, *_ = self.model_ids
        self._ask(ScaleModel(model_id=hog, max_instances=slots, target_concurrency=1))
        born = []
        for k in range(60 * slots):
            born.append(self._ask_for(hog, token_s=0.3))
            if k == 10 * slots:
                waiting = self._ask_for(other)
            self.sim.clock.run(0.5 / slots)
        assert waiting.is_done, f"{other} was kept from its turn by {hog}: {self._states([waiting])}"
        waited_s = (waiting.ended_s or 0.0) - waiting.request.created_at
        assert waited_s < HOG_WAIT_S_MAX, f"{other} was kept from its turn by {hog} for {waited_s:.1f} s"
        self.sim.clock.run(WAIT_S_MAX / 2)
        self._check_served(born)

    def _check_counts(self) -> None:
        """The scheduler counts no request as running that isn't: looked at twice, because news may be on its way."""
        excess: list[set[str]] = []
        for _ in range(2):
            running: dict[str, int] = {}
            for router in self.sim.routers.values():
                for activity in router.routes.activity():
                    running[activity.instance_id] = running.get(activity.instance_id, 0) + activity.requests
            leader = self.sim.leader
            assert leader is not None, "somebody leads"
            assert leader.controller is not None
            instances = leader.controller.cluster.instances.values()
            excess.append({i.instance_id for i in instances if i.requests > running.get(i.instance_id, 0)})
            self.sim.clock.run(1.5)
        assert not excess[0] & excess[1], f"requests are counted that do not run: {excess[0] & excess[1]}"

    def _end(self) -> None:
        self.sim.clock.run(20.0)
        check_rest(self.sim)

    def _ask_for(self, model_id: str, *, token_s: float = 0.1) -> SimStream:
        router_id = self.chance.choice(sorted(self.sim.routers))
        return self.sim.request(router_id, model_id, tokens=3, token_s=token_s)

    def _check_served(self, born: list[SimStream]) -> None:
        left = [stream for stream in born if not stream.is_done]
        assert not left, f"not served: {self._states(left)}"

    def _states(self, streams: list[SimStream]) -> list[str]:
        return [
            f"{s.request.request_id} {s.request.model_id} {s.request.state} {s.request.error or ''}" for s in streams
        ]


def _machines(chance: random.Random) -> dict[str, Machine]:
    """CPU servers, GPU servers with slots of different memory, or both. Every model fits somewhere."""
    machines: dict[str, Machine] = {}
    kinds = chance.choice([["cpu"], ["cpu", "cpu"], ["gpu"], ["gpu", "gpu"], ["cpu", "gpu", "gpu"]])
    for number, kind in enumerate(kinds):
        slots = chance.randint(1, 3)
        memories = (
            [GB // 4, *chance.choices([GB // 8, GB // 4, GB // 2], k=slots - 1)] if kind == "gpu" else [0] * slots
        )
        if kind == "gpu" and slots > 1:
            memories[1] = GB // 4
        pool_bytes = chance.choice([GB * 6 // 10, GB, 2 * GB])
        machines[f"s{number}"] = Machine(pool_bytes=pool_bytes, memories=tuple(memories))
    return machines
