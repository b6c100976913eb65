"""What the stories that a review found begin with."""

from __future__ import annotations

from whimbrel.wire.messages import (
    MigrationState,
    ScaleModel,
    Scaling,
    Tier,
)

from services.scheduler.core.settings import Settings
from tests.unit.scheduler.builders import ask
from tests.unit.scheduler.migration_stories import RUN_S, migrations
from tests.unit.scheduler.toy_peers import GB, ToyRequest
from tests.unit.scheduler.toys import ToyCluster

PATIENT = Settings(fair_wait_s=1000.0)


def holds(cluster: ToyCluster, server_id: str, **tiers: Tier) -> None:
    """What the server has of each model."""
    agent = cluster.agents[server_id]
    agent.tiers = {(name, f"digest-of-{name}"): (tier, GB // 4) for name, tier in tiers.items()}
    agent.beat()


def is_served_soon(cluster: ToyCluster, request_id: str = "late", seconds: float = 3.0) -> ToyRequest:
    """A new request for A has a route within the time."""
    late = cluster.router.request(request_id, "a", run_s=0.1)
    cluster.run(seconds)
    assert late.routed_s is not None, f"it has waited for {seconds} s"
    return late


TWO = Scaling(min_instances=2, max_instances=2, target_concurrency=1)


def two_of_a(cluster: ToyCluster) -> list[ToyRequest]:
    """A request runs on each of two instances of A, that need not be there."""
    running = [cluster.router.request(f"q{n}", "a", run_s=RUN_S) for n in range(2)]
    cluster.run(2.0)
    ask(cluster, ScaleModel(model_id="a", min_instances=0))
    assert len({one.instance_id for one in running} - {None}) == 2
    return running


def b_takes_over(cluster: ToyCluster) -> None:
    """B is asked for, for long, and A's migration gets as far as HANDOVER: no slot is left for a second A."""
    cluster.router.request("q2", "b", run_s=RUN_S)
    cluster.run_until(lambda: [r.state for r in migrations(cluster)] == [MigrationState.HANDOVER], 10.0)


def idle_ones_elsewhere(cluster: ToyCluster) -> None:
    """Two more servers, whose only slots have idle instances of C and D."""
    for server_id, model_id in (("s1", "c"), ("s2", "d")):
        cluster.start_agent(server_id)
        holds(cluster, server_id, **{model_id: Tier.DRAM})
        cluster.start_worker(server_id, 0)
        cluster.run(1.5)
        short = cluster.router.request(f"of-{model_id}", model_id)
        cluster.run_until(lambda short=short: short.is_done, 10.0)  # type: ignore[misc]
    cluster.run(1.0)
    assert {"s1", "s2"} <= {record.server_id for record in cluster.instances()}
