"""Random lives of a small cluster with losses and crashes around the real controller: what must hold after every step,
and that nobody is forgotten in the end. A failing seed is in the test's name."""

from __future__ import annotations

import random

import pytest
from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Unavailable
from whimbrel.wire.messages import Message
from whimbrel.wire.records import InstanceState

from services.scheduler.core.ready import Ready
from services.scheduler.core.settings import Settings
from tests.unit.scheduler.toy_peers import GB, ToyRequest
from tests.unit.scheduler.toys import ToyCluster, a_model_record

STEPS = 60
SEEDS = range(20)
MODELS = ("a", "b", "c", "d", "e")


def check_invariants(cluster: ToyCluster, ready: Ready) -> None:
    """A slot has one owner; a model one load; records replay to the state; every waiter is counted."""
    assert cluster.controller is not None
    state = cluster.controller.cluster
    assert state.durable() == cluster.store, "records replay to the same state"
    instances = cluster.instances()
    slots = [(record.server_id, record.slot) for record in instances]
    assert len(set(slots)) == len(slots), "a slot has one owner"
    standing = [r.model_id for r in instances if r.state is not InstanceState.DRAINING]
    assert len(set(standing)) == len(standing), "a model is loaded once"
    assert state.waiting_requests == sum(len(model.waiters) for model in state.models.values())
    assert set(state.waiting) == {model.model_id for model in state.models.values() if model.waiters}
    for model_id, reservation in state.reservations.items():
        slots = [state.servers[reservation.server_id].slots[slot] for slot in reservation.slots]
        assert all(slot.reserved_for == model_id for slot in slots)
        assert state.models[model_id].waiters, "a slot is kept for nobody"
    reserved = [slot.reserved_for for slot in state.slots() if slot.reserved_for is not None]
    assert sorted(reserved) == sorted(state.reservations)


class Chaos:
    """One random life."""

    def __init__(self, seed: int, *, servers: int, slots: int, pool_bytes: int) -> None:
        self.random = random.Random(seed)
        self.lossy = True
        self.cluster = ToyCluster(
            models=[a_model_record(m, size_bytes=GB // (4 + 2 * k)) for k, m in enumerate(MODELS)],
            servers=servers,
            slots=slots,
            pool_bytes=pool_bytes,
            settings=Settings(keep_alive_s=5.0, fair_wait_s=1.0, load_stall_s=8.0),
            drops=self.drops,
        )
        self.cluster.check = check_invariants
        self.requests: list[ToyRequest] = []
        self.cluster.start_router("r1")

    def drops(self, message: Message) -> bool:
        return self.lossy and self.random.random() < 0.03

    def act(self) -> None:
        """Something happens: mostly requests, sometimes trouble."""
        cluster, chance = self.cluster, self.random
        match chance.choices(
            ["request", "cancel", "worker", "agent", "scheduler", "router", "error"], [60, 5, 6, 5, 5, 4, 5]
        )[0]:
            case "request":
                router = cluster.routers[chance.choice(sorted(cluster.routers))]
                request_id = f"q{len(self.requests)}"
                run_s = chance.choice([0.05, 0.5, 3.0])
                self.requests.append(router.request(request_id, chance.choice(MODELS), run_s=run_s))
            case "cancel" if self.requests:
                chance.choice(self.requests).cancel()
            case "worker":
                server_id, slot = chance.choice(sorted(cluster.workers))
                cluster.kill_worker(server_id, slot)
                cluster.run(chance.choice([0.0, 0.3, 6.0]))
                cluster.start_worker(server_id, slot)
            case "agent":
                server_id = chance.choice(sorted(cluster.agents))
                tiers = cluster.kill_agent(server_id).tiers
                cluster.run(chance.choice([0.0, 0.3, 6.0]))
                cluster.start_agent(server_id, tiers=chance.choice([tiers, {}]))
            case "scheduler":
                cluster.stop_scheduler()
                cluster.run(chance.choice([0.0, 0.5, 6.0]))
                cluster.start_scheduler()
            case "router":
                router_id = chance.choice(sorted(cluster.routers))
                cluster.kill_router(router_id)
                cluster.run(chance.choice([0.0, 5.0]))
                cluster.start_router(router_id)
            case "error":
                agent = cluster.agents[chance.choice(sorted(cluster.agents))]
                agent.errors.append(error_reply(Unavailable(what="the disk")))

    def live(self, steps: int) -> None:
        self.cluster.run(1.5)
        for _ in range(steps):
            self.act()
            self.cluster.run(self.random.choice([0.0, 0.01, 0.2, 1.0]))
        self.lossy = False
        for agent in self.cluster.agents.values():
            agent.errors.clear()
        self.cluster.run(60.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_is_forgotten_whatever_gets_lost_or_dies(seed: int) -> None:
    """P2, C4: after the trouble every request of a router that lives was served, or was told why not."""
    chaos = Chaos(seed, servers=1 + seed % 3, slots=1 + seed % 2, pool_bytes=GB if seed % 4 else GB * 4 // 10)
    chaos.live(STEPS)
    forgotten = [r.request_id for r in chaos.requests if not r.is_over and r.router.is_alive]
    assert not forgotten, f"seed {seed}"
    assert sum(request.is_done for request in chaos.requests) > 10
    assert chaos.cluster.controller is not None
    assert chaos.cluster.controller.cluster.waiting_requests == 0


def test_the_same_seed_leads_to_the_same_life() -> None:
    """The controller decides from its inputs alone."""
    lives = []
    for _ in range(2):
        chaos = Chaos(5, servers=2, slots=1, pool_bytes=GB)
        chaos.live(60)
        lives.append(chaos.cluster.journal)
    assert lives[0] == lives[1]
