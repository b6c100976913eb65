"""What the stories of migrations begin with, and what must be so when they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from whimbrel.wire.events import (
    PublicEvent,
)
from whimbrel.wire.messages import (
    Message,
    MigrationState,
    Tier,
)
from whimbrel.wire.records import MigrationRecord

from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import a_cluster
from tests.unit.scheduler.toy_peers import GB, ToyRequest
from tests.unit.scheduler.toys import ToyCluster

RUN_S = 60.0


def figure_3(
    *, policy: str = "migration", drops: Callable[[Message], bool] = lambda message: False
) -> tuple[ToyCluster, ToyRequest]:
    """Figure 3 of the paper: A runs on the server that has B in DRAM, where A is in DRAM the other one has a free slot
    and B on its SSD."""
    settings = Settings(fair_wait_s=1000.0 if policy == "migration" else 1.0, policy=policy)
    cluster = a_cluster("a", "b", servers=2, settings=settings, drops=drops)
    for server_id, tiers in (("s0", {"a": Tier.DRAM, "b": Tier.SSD}), ("s1", {"a": Tier.DRAM, "b": Tier.DRAM})):
        agent = cluster.agents[server_id]
        agent.tiers = {(name, f"digest-of-{name}"): (tier, GB // 4) for name, tier in tiers.items()}
        agent.beat()
    cluster.kill_worker("s0", 0)
    cluster.run(4.0)
    running = cluster.router.request("q1", "a", run_s=RUN_S)
    cluster.run(1.0)
    assert running.instance_id is not None
    cluster.start_worker("s0", 0)
    cluster.run(1.5)
    cluster.said.clear()
    cluster.events.clear()
    return cluster, running


def told(cluster: ToyCluster) -> list[str]:
    """What the public heard of migrations."""
    return [event.verb for event in cluster.events if event.noun == "migration"]


E = TypeVar("E", bound=PublicEvent)


def event(cluster: ToyCluster, kind: type[E]) -> E:
    (found,) = [one for one in cluster.events if isinstance(one, kind)]
    return found


def migrations(cluster: ToyCluster) -> list[MigrationRecord]:
    return [record for record in cluster.store.values() if isinstance(record, MigrationRecord)]


def asks_for_b(cluster: ToyCluster, until: MigrationState) -> ToyRequest:
    """B is asked for, and A's migration gets as far as this state."""
    request = cluster.router.request("q2", "b")
    cluster.run_until(lambda: [record.state for record in migrations(cluster)] == [until], 10.0)
    return request


def in_the_end(cluster: ToyCluster) -> None:
    """Nobody is forgotten: no migration, no reservation, every slot has at most the instance that it serves."""
    cluster.run(5.0)
    assert not migrations(cluster)
    assert cluster.controller is not None
    state = cluster.controller.cluster
    assert not state.migrations
    assert not state.reservations
    for instance in state.instances.values():
        assert not instance.is_migrating
        assert not instance.is_closed
    for worker in cluster.workers.values():
        assert not worker.source.is_closed, "a worker goes on refusing requests"
