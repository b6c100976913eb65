"""Why a model is where it is, or waits: what people are told of decisions."""

from __future__ import annotations

import random

import pytest
from whimbrel.wire.errors import Conflict, ModelNotFound
from whimbrel.wire.messages import (
    CandidateSummary,
    CordonServer,
    DeployModel,
    ExplainModel,
    ExplainModelReply,
    Tier,
)

from services.scheduler.core.decisions import Placement
from services.scheduler.core.explain import on_explain_model, summarise
from services.scheduler.core.policies import POLICIES
from services.scheduler.core.ready import Arrived, Reply
from services.scheduler.core.settings import Settings
from services.scheduler.core.step import Step
from tests.unit.scheduler.builders import a_cluster, ask, place, served
from tests.unit.scheduler.random_clusters import random_snapshot
from tests.unit.scheduler.toy_peers import GB
from tests.unit.scheduler.toys import ToyCluster, a_model_record

PATIENT = Settings(fair_wait_s=1000.0)


def explained(cluster: ToyCluster, model_id: str) -> ExplainModelReply:
    """The answer; nothing else may come of the question."""
    controller = cluster.controller
    assert controller is not None
    before = controller.cluster.durable()
    step = Step(
        now=cluster.now, wall_s=cluster.now, epoch=1, scheduler_id="s", cluster=controller.cluster,
        settings=cluster.settings, new_id=lambda prefix: prefix,
    )  # fmt: skip
    on_explain_model(step, ExplainModel(model_id=model_id), "r")
    ready = step.ready()
    assert (ready.records, ready.events, ready.decisions) == ((), (), ())
    assert controller.cluster.durable() == before
    (answer,) = ready.messages
    assert answer.to == Reply(reply_to="r")
    assert isinstance(answer.message, ExplainModelReply)
    return answer.message


def terms(candidate: CandidateSummary) -> float:
    return candidate.queue_s + candidate.transfer_s + candidate.overhead_s


def test_a_cold_model_that_nobody_asks_for_is_told_where_it_would_start() -> None:
    """D3: the terms of t_load, for every server, the cheapest first."""
    cluster = a_cluster("a", servers=2)
    cluster.agents["s1"].tiers["a", "digest-of-a"] = (Tier.SSD, GB // 4)
    cluster.run(3.0)
    reply = explained(cluster, "a")
    assert (reply.last, reply.instances, reply.waiting_requests) == (None, (), 0)
    assert (reply.now.outcome, reply.now.policy, reply.now.server_id) == ("placed", "migration", "s1")
    first, second = reply.now.candidates
    assert (first.server_id, first.source_tier, first.slots) == ("s1", Tier.SSD, (0,))
    assert (second.server_id, second.source_tier, second.refusal) == ("s0", Tier.REMOTE, "")
    assert first.is_prior
    assert first.total_s == terms(first) < second.total_s == terms(second)
    assert (
        "Model a has no instance. Nobody waits for it; a request would have it loaded on s1 from ssd" in reply.sentence
    )


def test_a_model_that_waits_is_told_who_is_in_its_way_and_that_they_cannot_move() -> None:
    cluster = a_cluster("a", "b", "c", servers=2, settings=PATIENT)
    cluster.router.request("q1", "a", run_s=900.0)
    ask(cluster, CordonServer(server_id="s1"))
    cluster.run(3.0)
    cluster.router.request("q2", "b")
    cluster.run(4.0)
    reply = explained(cluster, "b")
    assert reply.waiting_requests == 1
    assert reply.last is not None
    assert (reply.last.outcome, reply.now.outcome) == ("deferred", "deferred")
    assert 0.0 < reply.last.age_s <= 4.0
    busy, cordoned = reply.now.candidates
    assert busy.refusal == "busy: 1 running instance that can't go elsewhere"
    assert cordoned.refusal == "closed: nothing is placed here until it is uncordoned, or its agent is started again"
    assert busy.source_tier is Tier.REMOTE
    assert terms(busy) > 0.0, "what a load there would take is told anyway"
    assert busy.total_s == 0.0
    assert reply.sentence == (
        "Model b has no instance. 1 request waits, the longest for 4.0 s. No server can take it now: "
        f"s0 is {busy.refusal}; s1 is {cordoned.refusal}."
    )


def test_an_instance_s_last_decision_is_kept_with_the_reasons_it_was_made_from() -> None:
    """D5"""
    cluster = a_cluster("a", servers=2)
    served(cluster)
    cluster.run(10.0)
    reply = explained(cluster, "a")
    assert reply.last is not None
    assert (reply.last.outcome, reply.last.server_id) == ("placed", "s0")
    assert reply.last.age_s > 10.0
    assert [candidate.source_tier for candidate in reply.last.candidates] == [Tier.REMOTE, Tier.REMOTE]
    tiers = {candidate.server_id: candidate.source_tier for candidate in reply.now.candidates}
    assert tiers == {"s0": Tier.DRAM, "s1": Tier.REMOTE}, "now its bytes are there"
    assert reply.now.server_id == "s1", "its own idle instance would not go for another one"
    (instance_id,) = reply.instances
    assert reply.sentence == f"Model a: {instance_id} serves on s0 slot 0."


def test_a_load_is_told_with_what_is_left_of_it() -> None:
    cluster = a_cluster("a")
    cluster.router.request("q1", "a")
    cluster.run(0.5)
    sentence = explained(cluster, "a").sentence
    assert "loads on s0 slot 0 from remote, about" in sentence
    assert "1 request waits" in sentence
    assert "would" not in sentence


def test_a_model_that_fits_nowhere_is_told_what_it_needs_and_what_there_is() -> None:
    cluster = ToyCluster(models=[a_model_record("huge", size_bytes=20 * GB)], servers=2)
    cluster.run(5.0)
    cluster.deliver(place("q1", "huge"))
    reply = explained(cluster, "huge")
    assert reply.last is not None
    assert (reply.last.outcome, reply.last.need_bytes, reply.last.candidates) == ("never_fits", 20 * GB, ())
    assert (reply.now.outcome, reply.now.capacity_bytes) == ("never_fits", 10 * GB)
    assert all(candidate.refusal.startswith("too small") for candidate in reply.now.candidates)
    assert "No server is large enough: it needs" in reply.sentence


def test_a_slot_without_memory_for_it_is_no_room() -> None:
    models = [a_model_record("a", size_bytes=6 * GB), a_model_record("b", size_bytes=6 * GB)]
    cluster = ToyCluster(models=models, slots=2, settings=PATIENT)
    cluster.run(5.0)
    cluster.router.request("q1", "a", run_s=900.0)
    cluster.run(60.0)
    (candidate,) = explained(cluster, "b").now.candidates
    assert candidate.refusal.startswith("no room: the model has 6")
    assert "1 running instance" in candidate.refusal


def test_a_gpu_server_without_slots_for_all_partitions_says_which_it_lacks() -> None:
    model = a_model_record("a", size_bytes=4 * GB, partition_bytes=(2 * GB, 2 * GB))
    cluster = ToyCluster(models=[model], servers=0, settings=PATIENT)
    cluster.start_agent("s0")
    cluster.start_worker("s0", 0, device="cuda:0", memory_bytes=3 * GB)
    cluster.start_worker("s0", 1, device="cuda:1", memory_bytes=GB)
    cluster.start_agent("s1")
    cluster.start_worker("s1", 0, device="cuda:0", memory_bytes=3 * GB)
    cluster.start_worker("s1", 1, device="cuda:1", memory_bytes=3 * GB)
    cluster.run(5.0)
    able, refused = explained(cluster, "a").now.candidates
    assert (able.server_id, able.slots) == ("s1", (0, 1))
    assert refused.refusal.startswith("busy: the model needs 2 slots (2.")
    assert "free or idle are 1." in refused.refusal


def test_a_model_whose_slot_must_be_left_first_is_told_so() -> None:
    cluster = a_cluster("a", "b", settings=Settings(fair_wait_s=1.0))
    cluster.router.request("q1", "a", run_s=900.0)
    cluster.run(3.0)
    cluster.router.request("q2", "b")
    cluster.run(3.0)
    assert cluster.controller is not None
    (instance_id,) = cluster.controller.cluster.reservations["b"].waiting_for
    reply = explained(cluster, "b")
    assert f"Slot 0 of s0 is kept for it when {instance_id} has left" in reply.sentence
    assert f"{instance_id} ends its last requests on s0 slot 0" in explained(cluster, "a").sentence


def test_without_servers_that_is_what_is_said() -> None:
    cluster = a_cluster("a", servers=0)
    reply = explained(cluster, "a")
    assert (reply.now.outcome, reply.now.candidates) == ("deferred", ())
    assert "No server lives that could take it" in reply.sentence


def test_a_decision_of_an_earlier_leader_has_its_outcome_but_no_reasons() -> None:
    cluster = a_cluster("a")
    served(cluster)
    cluster.stop_scheduler()
    cluster.start_scheduler()
    cluster.run(2.0)
    last = explained(cluster, "a").last
    assert last is not None
    assert (last.outcome, last.policy, last.server_id, last.candidates) == ("placed", "", "s0", ())


def test_locality_says_whom_it_waits_for() -> None:
    cluster = a_cluster("a", "b", servers=2, settings=Settings(policy="locality", fair_wait_s=1000.0))
    cluster.agents["s0"].tiers["b", "digest-of-b"] = (Tier.DRAM, GB // 4)
    cluster.router.request("q1", "a", run_s=900.0)
    cluster.run(5.0)
    cluster.router.request("q2", "b")
    cluster.run(2.0)
    reply = explained(cluster, "b")
    assert (reply.now.outcome, reply.now.server_id, reply.now.policy) == ("deferred", "s0", "locality")
    assert "The policy locality waits for s0" in reply.sentence


def test_what_is_not_there_or_not_ready_is_refused() -> None:
    cluster = a_cluster("a")
    with pytest.raises(ModelNotFound):
        explained(cluster, "absent")
    cluster.deliver(Arrived(message=DeployModel(model_id="new", source="/models/new"), reply_to="r"))
    with pytest.raises(Conflict, match="'new' is importing"):
        explained(cluster, "new")


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_terms_of_every_candidate_add_up_and_the_chosen_one_is_among_them(policy: str) -> None:
    """D5, on random small clusters where instances can move: what is shown is what was compared."""
    placed = moved = 0
    for seed in range(200):
        snapshot, task = random_snapshot(random.Random(seed))
        decision = POLICIES[policy](snapshot, task, 100.0)
        summary = summarise(decision, policy=policy, age_s=0.0)
        able = [candidate for candidate in summary.candidates if not candidate.refusal]
        for one in able:
            moving_s = sum(move.load_s + move.resume_s for move in one.moves)
            # What clients see of a move, and what stopping costs, is in the total alone.
            assert one.total_s >= terms(one) + one.eviction_s + moving_s - 1e-9, f"seed {seed}"
            if not one.moves and not one.stopped:
                assert one.total_s == pytest.approx(terms(one) + one.eviction_s), f"seed {seed}"
        assert [(c.is_avoided, c.total_s) for c in able] == sorted((c.is_avoided, c.total_s) for c in able)
        if isinstance(decision, Placement):
            chosen = next(candidate for candidate in able if candidate.server_id == decision.server_id)
            assert chosen.total_s == pytest.approx(decision.cost_s), f"seed {seed}"
            placed += 1
            moved += bool(chosen.moves or chosen.stopped)
    assert placed > 20
    assert (moved > 0) == (policy in ("migration", "preemption"))
