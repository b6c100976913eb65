"""Each policy by itself, on clusters so small that the right answer is worked out by hand.

The wanted model is `a`, of 8 bytes: 4 s from the repository, 1 s from SSD, 1/8 s from DRAM. All of these are sums of
powers of two, so costs are compared exactly.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, permutations

import msgspec
import pytest
from whimbrel.wire.messages import Tier

from services.scheduler.core import plans
from services.scheduler.core.decisions import Candidate, Decision, Deferred, NeverFits, Placement, Refusal
from services.scheduler.core.estimates import PathSpeed
from services.scheduler.core.policies import POLICIES
from services.scheduler.core.queues import PathWait
from services.scheduler.core.residency import Resident
from services.scheduler.core.views import Occupant, Resume, ServerView, Shape, SlotView, Snapshot, Task
from tests.unit.scheduler.random_clusters import NOW_S, random_snapshot

SIZE = 8
REMOTE_S, SSD_S, DRAM_S = 4.0, 1.0, 0.125
SPEEDS = {
    tier: PathSpeed(source_tier=tier, seconds_per_byte=seconds / SIZE, overhead_s=0.0, is_prior=False)
    for tier, seconds in ((Tier.REMOTE, REMOTE_S), (Tier.SSD, SSD_S), (Tier.DRAM, DRAM_S))
}


def a_task(model_id: str = "a", *, partitions: int = 1, draw: int = 0, avoid: str = "") -> Task:
    return Task(
        model_id=model_id,
        checkpoint_digest=f"digest-{model_id}",
        size_bytes=SIZE,
        partition_bytes=(SIZE // partitions,) * partitions,
        avoid=frozenset(avoid.split()),
        draw=draw,
    )


def idle(instance_id: str, slot: int = 0, *, model_id: str = "x", reload_s: float = 0.25) -> Occupant:
    return Occupant(
        instance_id=instance_id, slots=(SlotView(slot),), task=a_task(model_id), room_bytes=0, reload_s=reload_s
    )


def running(
    instance_id: str,
    slot: int = 0,
    *,
    resume: Resume | None = Resume(0.5, 0.0, NOW_S),  # noqa: B008 (immutable)
    reload_s: float = 0.25,
    pause_s: float = 0.0,
) -> Occupant:
    return msgspec.structs.replace(idle(instance_id, slot, reload_s=reload_s), resume=resume, pause_s=pause_s)


def a_server(
    server_id: str,
    tier: Tier | None = None,
    *,
    free: tuple[int, ...] = (),
    idle: tuple[Occupant, ...] = (),
    running: tuple[Occupant, ...] = (),
    x_tier: Tier | None = None,
    ssd_queue_s: float = 0.0,
    capacity_bytes: int = 64,
    takes_loads: bool = True,
) -> ServerView:
    """A GPU server; `tier` is where it has `a`, `x_tier` where it has what the occupants run."""
    held = {"a": tier, "x": x_tier}
    return ServerView(
        server_id=server_id,
        capacity_bytes=capacity_bytes,
        used_bytes=0,
        free_slots=tuple(SlotView(slot) for slot in free),
        idle=idle,
        running=running,
        waits={Tier.SSD: PathWait(NOW_S + ssd_queue_s / 2, ssd_queue_s / 2)},
        residency={a_task(name).checkpoint: Resident(at, SIZE) for name, at in held.items() if at is not None},
        speeds=SPEEDS,
        is_host=False,
        takes_loads=takes_loads,
    )


def decide(policy: str, *servers: ServerView, task: Task | None = None) -> Decision:
    shapes = frozenset(Shape(False, server.capacity_bytes, (0,) * 4) for server in servers)
    return POLICIES[policy](Snapshot(servers=servers, shapes=shapes), task or a_task(), NOW_S)


def placed(policy: str, *servers: ServerView, task: Task | None = None) -> Placement:
    decision = decide(policy, *servers, task=task)
    assert isinstance(decision, Placement), decision
    return decision


def deferred(policy: str, *servers: ServerView, task: Task | None = None) -> Deferred:
    decision = decide(policy, *servers, task=task)
    assert isinstance(decision, Deferred), decision
    return decision


def terms(decision: Placement | Deferred, server_id: str) -> Candidate:
    (found,) = [one for one in decision.reasons.candidates() if one.server_id == server_id]
    return found


# --- availability ---


def test_availability_takes_a_free_slot_far_away_before_evicting_where_the_bytes_are() -> None:
    """C8"""
    near, far = a_server("s0", Tier.DRAM, idle=(idle("i", reload_s=0.0),)), a_server("s1", free=(0,))
    decision = placed("availability", near, far)
    assert (decision.server_id, decision.evict, decision.cost_s) == ("s1", (), REMOTE_S)
    assert placed("migration", near, far).server_id == "s0", "another policy would know better"


def test_availability_takes_the_cheapest_of_those_with_a_free_slot() -> None:
    """C8"""
    servers = (a_server("s0", free=(0,)), a_server("s1", Tier.SSD, free=(0,)), a_server("s2", Tier.DRAM, free=(0,)))
    assert placed("availability", *servers).server_id == "s2"


def test_availability_evicts_as_few_as_possible_when_no_slot_is_free() -> None:
    """C8: one eviction and the repository, rather than two and DRAM."""
    two = a_server("s0", Tier.DRAM, idle=(idle("i0", 0), idle("i1", 1)))
    one = a_server("s1", free=(0,), idle=(idle("i2", 1),))
    decision = placed("availability", two, one, task=a_task(partitions=2))
    assert (decision.server_id, decision.slots, decision.evict) == ("s1", (0, 1), ("i2",))


def test_availability_rather_evicts_than_takes_the_free_slot_where_the_load_just_failed() -> None:
    """C8"""
    failed, other = a_server("s0", Tier.DRAM, free=(0,)), a_server("s1", idle=(idle("i"),))
    decision = placed("availability", failed, other, task=a_task(avoid="s0"))
    assert (decision.server_id, decision.evict) == ("s1", ("i",))


@pytest.mark.parametrize("policy", ["availability", "random"])
def test_policies_without_moves_leave_running_instances_alone_and_wait_for_nobody_in_particular(policy: str) -> None:
    """C4, C8: another server would even have room for who is in the way."""
    busy = a_server("s0", Tier.DRAM, running=(running("r"),))
    decision = deferred(policy, busy, a_server("s1", free=(0,)), task=a_task(partitions=2))
    assert decision.wait_for == ""
    assert [one.refusal for one in decision.reasons.candidates()] == [Refusal.BUSY, Refusal.BUSY]


# --- locality ---


def test_locality_waits_for_the_nearest_server_while_another_has_a_free_slot() -> None:
    """C8: and takes it as soon as its slot is free."""
    busy, other = a_server("s1", Tier.DRAM, running=(running("r"),)), a_server("s0", Tier.SSD, free=(0,))
    waiting = deferred("locality", other, busy)
    assert waiting.wait_for == "s1"
    assert terms(waiting, "s0").refusal is None, "it was possible, and is told so"
    assert terms(waiting, "s1").refusal is Refusal.BUSY
    assert placed("locality", other, a_server("s1", Tier.DRAM, free=(0,))).server_id == "s1"


def test_locality_evicts_on_the_nearest_server_whatever_that_costs() -> None:
    """C8"""
    decision = placed(
        "locality", a_server("s0", Tier.DRAM, idle=(idle("i", reload_s=64.0),)), a_server("s1", Tier.SSD, free=(0,))
    )
    assert (decision.server_id, decision.evict, decision.cost_s) == ("s0", ("i",), DRAM_S + 64.0)


def test_locality_counts_the_queue_in_what_is_near() -> None:
    """C8, E1: a queue of 3 s at one SSD makes the other nearer, and one of 4 s makes the repository nearer."""
    queueing = a_server("s0", Tier.SSD, free=(0,), ssd_queue_s=4.0)
    assert placed("locality", queueing, a_server("s1", Tier.SSD, free=(0,), ssd_queue_s=3.0)).server_id == "s1"
    assert placed("locality", queueing, a_server("s1", free=(0,))).server_id == "s1"
    assert deferred("locality", queueing, a_server("s1")).wait_for == "s1", "it may well wait for a repository load"


def test_locality_does_not_wait_for_a_server_that_is_out_of_the_question() -> None:
    """C8: cordoned, too small, or just failed while there is another."""
    other = a_server("s3", free=(0,))
    assert placed("locality", a_server("s0", Tier.DRAM, takes_loads=False), other).server_id == "s3"
    assert placed("locality", a_server("s0", Tier.DRAM, capacity_bytes=SIZE - 1), other).server_id == "s3"
    failed = a_server("s0", Tier.DRAM)
    assert placed("locality", failed, other, task=a_task(avoid="s0")).server_id == "s3"
    assert deferred("locality", failed, task=a_task(avoid="s0")).wait_for == "s0", "it is the only one"


def test_locality_with_nobody_to_wait_for_names_nobody() -> None:
    """C4, C8"""
    assert deferred("locality", a_server("s0", takes_loads=False)).wait_for == ""
    assert deferred("locality").wait_for == ""


def test_of_equally_near_servers_locality_waits_for_the_lower_id() -> None:
    """C5: the same one each time, although the other has a slot."""
    assert deferred("locality", a_server("s1", Tier.SSD, free=(0,)), a_server("s0", Tier.SSD)).wait_for == "s0"


# --- random ---


def test_random_takes_what_was_drawn_and_every_server_as_often() -> None:
    """C5, C8: by id, in whatever order the servers are told; one that evicts is as good as any."""
    servers = [a_server("s2", free=(0,)), a_server("s0", Tier.DRAM, free=(0,)), a_server("s1", idle=(idle("i"),))]
    for order in permutations(servers):
        chosen = [placed("random", *order, task=a_task(draw=draw)).server_id for draw in range(6)]
        assert chosen == ["s0", "s1", "s2", "s0", "s1", "s2"]
    assert placed("random", *servers, task=a_task(draw=1)).evict == ("i",)


@pytest.mark.parametrize("draw", range(12))
def test_random_never_takes_a_server_that_refuses_or_just_failed(draw: int) -> None:
    """C8"""
    servers = (
        a_server("s0", Tier.DRAM, free=(0,), takes_loads=False),
        a_server("s1", Tier.DRAM, free=(0,), capacity_bytes=SIZE - 1),
        a_server("s2", Tier.DRAM, running=(running("r"),)),
        a_server("s3", Tier.DRAM, free=(0,)),
        a_server("s4", free=(0,)),
        a_server("s5", free=(0,)),
    )
    decision = placed("random", *servers, task=a_task(draw=draw, avoid="s3"))
    assert decision.server_id == ("s4", "s5")[draw % 2]
    refusals = {one.server_id: one.refusal for one in decision.reasons.candidates() if one.refusal is not None}
    assert refusals == {"s0": Refusal.CLOSED, "s1": Refusal.TOO_SMALL, "s2": Refusal.BUSY}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_server_that_just_failed_is_taken_when_it_is_the_only_one(policy: str) -> None:
    """C8: every policy takes any other first, and this one before it gives up."""
    failed, cordoned = a_server("s0", Tier.DRAM, free=(0,)), a_server("s1", free=(0,), takes_loads=False)
    task = a_task(draw=1, avoid="s0")
    assert placed(policy, failed, cordoned, task=task).server_id == "s0"
    assert placed(policy, failed, cordoned, a_server("s2", free=(0,)), task=task).server_id == "s2"


# --- preemption ---


def test_preemption_stops_who_is_in_the_way_and_its_cost_is_loading_and_computing_again() -> None:
    """C8: 1/4 s to load it, and after 8 s more of decoding 1/2 s + 8/32 s to compute its tokens."""
    in_the_way = running("r", resume=Resume(0.5, 1 / 32, NOW_S - 8.0), reload_s=0.25)
    decision = placed("preemption", a_server("s0", Tier.DRAM, running=(in_the_way,)), a_server("s1", free=(0,)))
    assert (decision.server_id, decision.slots, decision.stopped) == ("s0", (0,), ("r",))
    assert (decision.moves, decision.evict) == ((), ())
    assert terms(decision, "s0").stop_s == 0.25 + 0.5 + 0.25
    assert decision.cost_s == DRAM_S + 1.0


def test_the_pause_of_a_move_does_not_keep_preemption_from_the_cheapest_server() -> None:
    """C2, C8: stopping r costs 1/4 + 1/2 s however long the pause of a move would be; s1 costs 4 s."""
    server = a_server("s0", Tier.DRAM, running=(running("r", reload_s=0.25, pause_s=9.0),))
    decision = placed("preemption", server, a_server("s1", free=(0,)))
    assert terms(decision, "s0").cost_s == DRAM_S + 0.75
    assert decision.server_id == "s0"


def test_preemption_stops_what_costs_least_and_no_more_than_needed() -> None:
    """C8"""
    three = (running("r0", 0, reload_s=1.0), running("r1", 1, reload_s=0.5), running("r2", 2, reload_s=0.25))
    server = a_server("s0", Tier.DRAM, running=three)
    one = placed("preemption", server)
    assert (one.stopped, one.slots, one.cost_s) == (("r2",), (2,), DRAM_S + 0.25 + 0.5)
    two = placed("preemption", server, task=a_task(partitions=2))
    assert (two.stopped, two.slots, two.cost_s) == (("r1", "r2"), (1, 2), DRAM_S + 0.75 + 2 * 0.5)


def test_preemption_evicts_an_idle_instance_before_it_stops_anybody() -> None:
    """C6, C8: even one that costs more to bring back; nobody waits for it."""
    server = a_server("s0", Tier.DRAM, idle=(idle("i", 0, reload_s=2.0),), running=(running("r", 1),))
    decision = placed("preemption", server)
    assert (decision.evict, decision.stopped) == (("i",), ())


@pytest.mark.parametrize(("reload_s", "chosen"), [(0.25, "s0"), (0.375, "s1"), (0.5, "s1")])
def test_preemption_stops_only_when_that_is_strictly_cheaper(reload_s: float, chosen: str) -> None:
    """C5, C8: 1/8 + (reload + 1/2) against 1 s from SSD, where nobody is disturbed; a draw disturbs nobody."""
    busy = a_server("s0", Tier.DRAM, running=(running("r", reload_s=reload_s),))
    assert placed("preemption", busy, a_server("s1", Tier.SSD, free=(0,))).server_id == chosen


def test_preemption_does_not_stop_what_can_not_be_taken_up_again() -> None:
    """C4, C8"""
    decision = deferred("preemption", a_server("s0", Tier.DRAM, running=(running("r", resume=None),)))
    assert terms(decision, "s0").refusal is Refusal.BUSY


# --- migration ---


@pytest.mark.parametrize(
    ("resume_s", "pause_s", "chosen"),
    [
        pytest.param(0.5, 0.125, "s0", id="less"),
        pytest.param(0.5, 0.25, "s1", id="the same, and nobody has to move"),
        pytest.param(0.75, 0.0, "s1", id="the same without a pause"),
        pytest.param(0.5, 0.5, "s1", id="more, as the pause counts"),
        pytest.param(2.0, 0.0, "s1", id="more"),
    ],
)
def test_migration_moves_only_when_that_is_strictly_cheaper(resume_s: float, pause_s: float, chosen: str) -> None:
    """C1, C6: load of a (1/8) + load of x at s1 (1/8) + resume + pause, against 1 s from SSD at s1."""
    mover = running("r", resume=Resume(resume_s, 0.0, NOW_S), pause_s=pause_s)
    servers = (
        a_server("s0", Tier.DRAM, running=(mover,)),
        a_server("s1", Tier.SSD, free=(0,), x_tier=Tier.DRAM),
    )
    decision = placed("migration", *servers)
    assert decision.server_id == chosen
    assert terms(decision, "s0").cost_s == 2 * DRAM_S + resume_s + pause_s
    assert [(m.instance_id, m.server_id) for m in decision.moves] == ([("r", "s1")] if chosen == "s0" else [])


@pytest.mark.parametrize(("reload_s", "chosen"), [(0.125, "s0"), (0.25, "s2"), (8.0, "s2")])
def test_what_goes_at_the_destination_is_a_part_of_what_a_move_costs(reload_s: float, chosen: str) -> None:
    """C1, C6: s2 has a from SSD for 1 s. The move is 5/8 s, a itself 1/8 s; what is idle at s1 must go."""
    servers = (
        a_server("s0", Tier.DRAM, running=(running("r"),)),
        a_server("s1", x_tier=Tier.DRAM, idle=(idle("i", model_id="y", reload_s=reload_s),)),
        a_server("s2", Tier.SSD, free=(0,)),
    )
    decision = placed("migration", *servers)
    assert decision.server_id == chosen
    if chosen == "s0":
        assert (decision.evict, decision.moves[0].evict) == (("i",), ("i",))
        assert decision.cost_s == DRAM_S + DRAM_S + 0.5 + reload_s


def test_a_move_to_where_its_model_is_idle_loads_nothing() -> None:
    """C1, G3"""
    twin = a_server("s1", idle=(idle("twin", model_id="x"),))
    decision = placed("migration", a_server("s0", Tier.DRAM, running=(running("r"),)), twin)
    (move,) = decision.moves
    assert (move.into, move.load, move.total_s) == ("twin", None, 0.5)
    assert decision.evict == ()


@pytest.mark.parametrize(
    "servers",
    [
        pytest.param((a_server("s0", running=(running("r", resume=None),)), a_server("s1", free=(0,))), id="can't"),
        pytest.param((a_server("s0", running=(running("r"),)), a_server("s1")), id="nowhere to go"),
        pytest.param(
            (a_server("s0", running=(running("r"),)), a_server("s1", free=(0,), takes_loads=False)), id="only cordoned"
        ),
    ],
)
def test_without_a_possible_move_the_task_is_held(servers: tuple[ServerView, ...]) -> None:
    """C4: two GPUs are needed, so the free one of s1 alone is not enough."""
    held = msgspec.structs.replace(servers[0], free_slots=(SlotView(1),))
    decision = deferred("migration", held, *servers[1:], task=a_task(partitions=2))
    assert all(candidate.refusal is not None for candidate in decision.reasons.candidates())


def test_preemption_and_migration_count_the_same_tokens_with_the_same_estimate() -> None:
    """C8: what it takes to compute the tokens of r again is t_migrate in both."""
    mover = running("r", resume=Resume(0.5, 1 / 32, NOW_S - 8.0), reload_s=DRAM_S)
    servers = (a_server("s0", Tier.DRAM, running=(mover,)), a_server("s1", free=(0,), x_tier=Tier.DRAM))
    (move,) = placed("migration", *servers).moves
    assert move.resume_s == 0.75
    assert terms(placed("preemption", *servers), "s0").stop_s == move.total_s


# --- all of them ---


def test_the_policies_that_are_to_be_compared_can_all_be_chosen() -> None:
    """C8"""
    assert set(POLICIES) == {"availability", "locality", "preemption", "random", "migration"}


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_servers_are_told_apart_by_their_ids_alone(policy: str) -> None:
    """C5"""
    servers = [a_server(server_id, Tier.SSD, free=(0, 1)) for server_id in ("s2", "s0", "s1")]
    assert {placed(policy, *order).server_id for order in permutations(servers)} == {"s0"}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_that_fits_nowhere_is_refused_by_every_policy(policy: str) -> None:
    """C4, C8: not held for ever."""
    decision = decide(policy, a_server("s0", capacity_bytes=SIZE - 1), a_server("s1", capacity_bytes=4))
    assert decision == NeverFits(model_id="a", need_bytes=SIZE, capacity_bytes=SIZE - 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_in_which_servers_are_told_changes_nothing(policy: str) -> None:
    """C5: 400 random clusters; and what is decided is one of the candidates, with the estimates that all share (C8)."""
    placements = 0
    for seed in range(400):
        chance = random.Random(seed)
        snapshot, task = random_snapshot(chance)
        task = msgspec.structs.replace(task, draw=chance.randrange(100))
        decision = POLICIES[policy](snapshot, task, NOW_S)
        shuffled = chance.sample(snapshot.servers, k=len(snapshot.servers))
        other = POLICIES[policy](msgspec.structs.replace(snapshot, servers=tuple(shuffled)), task, NOW_S)
        assert not isinstance(decision, NeverFits), f"seed {seed}"
        assert not isinstance(other, NeverFits), f"seed {seed}"
        bare = [msgspec.structs.replace(one, reasons=decision.reasons) for one in (decision, other)]
        assert bare[0] == bare[1], f"seed {seed}"
        if isinstance(decision, Placement):
            placements += 1
            mine = terms(decision, decision.server_id)
            assert (mine.cost_s, mine.slots, mine.evict) == (decision.cost_s, decision.slots, decision.evict)
            if not decision.moves:
                (server,) = [one for one in snapshot.servers if one.server_id == decision.server_id]
                assert decision.estimate == plans.load_estimate(server, task, NOW_S), f"seed {seed}"
    assert placements > 100


def subsets(occupants: tuple[Occupant, ...]) -> Iterator[tuple[Occupant, ...]]:
    for count in range(len(occupants) + 1):
        yield from combinations(occupants, count)


def stopping_ways(server: ServerView, task: Task) -> Iterator[tuple[float, float, int, int]]:
    """Every way to make room by stopping and evicting: what that costs, and how many go."""
    if not server.takes_loads:
        return
    count = 1 if server.is_host else len(task.partition_bytes)
    # Nobody goes for another instance of the own model.
    able = tuple(o for o in server.running if o.resume is not None and o.task.model_id != task.model_id)
    idle = tuple(o for o in server.idle if o.task.model_id != task.model_id)
    for stopped in subsets(able):
        for gone in subsets(idle):
            slots = [*server.free_slots, *(slot for one in (*stopped, *gone) for slot in one.slots)]
            room = server.capacity_bytes - server.used_bytes + sum(one.room_bytes for one in (*stopped, *gone))
            fits = server.is_host or any(
                all(slot.memory_bytes >= size for slot, size in zip(chosen, task.partition_bytes, strict=True))
                for chosen in permutations(slots, count)
            )
            if fits and len(slots) >= count and room >= task.size_bytes:
                stop_s = sum(one.reload_s + one.resume.seconds(NOW_S) for one in stopped if one.resume is not None)
                yield stop_s, sum(one.reload_s for one in gone), len(stopped), len(gone)


def test_preemption_equals_brute_force_over_all_that_could_be_stopped() -> None:
    """C2, C8: 2,000 random clusters. On a server the least is stopped; of the servers the cheapest is taken."""
    stops = 0
    for seed in range(2000):
        snapshot, task = random_snapshot(random.Random(seed))
        ranks = []
        for server in snapshot.servers:
            ways = list(stopping_ways(server, task))
            if ways and task.size_bytes <= server.capacity_bytes:
                stop_s, reload_s, stopped, gone = min(ways)
                load_s = plans.load_estimate(server, task, NOW_S).total_s
                is_avoided = server.server_id in task.avoid
                ranks.append((is_avoided, load_s + stop_s + reload_s, stopped, gone, server.server_id))
        decision = POLICIES["preemption"](snapshot, task, NOW_S)
        if isinstance(decision, Deferred):
            assert not ranks, f"seed {seed}: deferred, but {min(ranks)} was possible"
            continue
        assert isinstance(decision, Placement), f"seed {seed}"
        stops += bool(decision.stopped)
        chosen = (decision.cost_s, len(decision.stopped), len(decision.evict), decision.server_id)
        assert chosen == min(ranks)[1:], f"seed {seed}"
    assert stops > 100
