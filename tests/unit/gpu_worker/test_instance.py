"""The life of an instance: every state with every event, and every order in which the news of a load may come."""

from __future__ import annotations

import itertools

import pytest
from whimbrel.wire.errors import Conflict, InstanceGone, LoadFailed, StaleEpoch
from whimbrel.wire.messages import WorkerState

from services.gpu_worker.core.instance import (
    LEAVING,
    MAPPED,
    TRANSITIONS,
    WORK,
    WORKER_STATES,
    IllegalTransition,
    Instance,
    State,
    Work,
)
from services.gpu_worker.core.instance_events import (
    BytesVerified,
    ChunksMapped,
    ChunksReplaced,
    ConfigArrived,
    DrainAsked,
    Emptied,
    Event,
    ModelActivated,
    SkeletonBuilt,
    TensorsBound,
    UnloadAsked,
    WorkFailed,
)

FAILED = WorkFailed(LoadFailed(model_id="m", reason="tensor missing"))
EVENTS: tuple[Event, ...] = (
    ConfigArrived(),
    ChunksMapped(),
    ChunksReplaced(),
    BytesVerified(),
    SkeletonBuilt(),
    TensorsBound(),
    ModelActivated(),
    FAILED,
    DrainAsked(),
    UnloadAsked(),
    Emptied(),
)

# The shortest way into each state.
WAYS: dict[State, tuple[Event, ...]] = {
    State.EMPTY: (),
    State.PREPARING: (ConfigArrived(),),
    State.PREPARED: (ConfigArrived(), SkeletonBuilt()),
    State.ATTACHED: (ChunksMapped(),),
    State.BINDING: (ConfigArrived(), SkeletonBuilt(), ChunksMapped()),
    State.BOUND: (ConfigArrived(), SkeletonBuilt(), ChunksMapped(), TensorsBound()),
    State.ACTIVATING: (ConfigArrived(), SkeletonBuilt(), ChunksMapped(), TensorsBound(), BytesVerified()),
}
WAYS[State.READY] = (*WAYS[State.ACTIVATING], ModelActivated())
WAYS[State.DRAINING] = (*WAYS[State.READY], DrainAsked())
WAYS[State.UNLOADING] = (*WAYS[State.READY], UnloadAsked())


def an_instance(state: State = State.EMPTY) -> Instance:
    """One whose chunks, where there are any, belong to the agent's life 5."""
    instance = Instance("inst-1", "m")
    for event in WAYS[state]:
        if isinstance(event, ChunksMapped):
            instance.attach(5, 0.0)
        else:
            instance.on(event, 0.0)
    assert instance.state is state
    return instance


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, EVENTS)), ids=str)
def test_every_state_takes_exactly_the_events_of_its_row(state: State, event: Event) -> None:
    instance = an_instance(state)
    expected = TRANSITIONS[state].get(type(event))
    if expected is None:
        with pytest.raises(IllegalTransition, match=type(event).__name__):
            instance.on(event, 1.0)
        assert instance.state is state
    else:
        assert instance.on(event, 1.0) is WORK.get((state, type(event)))
        assert instance.state is expected


def test_the_tables_are_total() -> None:
    assert set(TRANSITIONS) == set(WORKER_STATES) == set(State)
    assert {type(event) for event in EVENTS} == {event for row in TRANSITIONS.values() for event in row}
    assert all(any(target is state for row in TRANSITIONS.values() for target in row.values()) for state in State)


def drive(order: tuple[str, ...]) -> tuple[Instance, list[Work]]:
    """Prepare, attach and activate in `order`; the engine's thread finishes each piece of work before the next news."""
    instance, done = Instance("inst-1", "m"), list[Work]()
    ends: dict[Work, Event] = {
        Work.BUILD: SkeletonBuilt(),
        Work.BIND: TensorsBound(),
        Work.ACTIVATE: ModelActivated(),
    }
    for command in order:
        match command:
            case "prepare":
                work = instance.prepare(0.0)
            case "attach":
                work = instance.attach(5, 0.0) if instance.wants_chunks(5) else None
            case _:
                work = instance.verify(0.0)
        while work is not None:
            done.append(work)
            work = instance.on(ends[work], 0.0) if work in ends else None
    return instance, done


@pytest.mark.parametrize(
    "order",
    [
        ("prepare", "attach", "activate"),
        ("attach", "prepare", "activate"),
        ("attach", "activate", "prepare"),
        ("attach", "activate"),
        ("prepare", "prepare", "attach", "attach", "activate", "activate", "prepare", "attach"),
    ],
    ids="-".join,
)
def test_the_news_of_a_load_may_come_in_any_order_and_twice(order: tuple[str, ...]) -> None:
    instance, done = drive(order)
    assert instance.state is State.READY
    assert done == [Work.BUILD, Work.BIND, Work.ACTIVATE, Work.ANNOUNCE]


def test_bytes_that_are_verified_before_the_skeleton_is_built_are_remembered() -> None:
    """L6: whichever is slower, bytes or skeleton, the other waits for it."""
    instance = an_instance(State.ATTACHED)
    assert instance.verify(1.0) is None
    assert instance.on(SkeletonBuilt(), 3.0) is Work.BIND
    assert instance.on(TensorsBound(), 3.5) is Work.ACTIVATE
    assert instance.on(ModelActivated(), 4.0) is Work.ANNOUNCE
    assert instance.unhidden.skeleton_s == pytest.approx(2.0)
    assert instance.unhidden.bind_s == pytest.approx(1.0)


def test_a_skeleton_that_was_built_while_bytes_moved_costs_nothing() -> None:
    """L6: what loading hides is not reported as the worker's time."""
    instance = an_instance(State.BOUND)
    assert instance.verify(7.0) is Work.ACTIVATE
    instance.on(ModelActivated(), 7.25)
    assert instance.unhidden.skeleton_s == 0.0
    assert instance.unhidden.bind_s == pytest.approx(0.25)


@pytest.mark.parametrize("state", [State.EMPTY, State.PREPARING, State.PREPARED, State.DRAINING, State.UNLOADING])
def test_activation_without_chunks_is_refused_because_the_agent_spoke_to_an_earlier_life(state: State) -> None:
    with pytest.raises(InstanceGone, match="inst-1"):
        an_instance(state).verify(0.0)


@pytest.mark.parametrize("state", list(State))
def test_chunks_are_wanted_once_and_never_by_an_instance_that_leaves(state: State) -> None:
    instance = an_instance(state)
    if state in (State.DRAINING, State.UNLOADING):
        with pytest.raises(InstanceGone):
            instance.wants_chunks(5)
    else:
        assert instance.wants_chunks(5) is (state not in MAPPED)


RELOADED = (State.ATTACHED, State.BINDING, State.BOUND, State.ACTIVATING)


@pytest.mark.parametrize("state", list(State))
def test_chunks_of_the_next_life_of_the_agent_are_wanted_while_the_instance_loads(state: State) -> None:
    instance = an_instance(state)
    if state in LEAVING:
        with pytest.raises(InstanceGone):
            instance.wants_chunks(6)
    else:
        assert instance.wants_chunks(6) is (state is not State.READY)


@pytest.mark.parametrize("state", [state for state in State if state in MAPPED - LEAVING])
def test_a_former_life_of_the_agent_is_not_obeyed(state: State) -> None:
    """What a killed agent said last would name chunks that its successor fills with something else."""
    with pytest.raises(StaleEpoch, match="epoch 4 is over; the current one is 5"):
        an_instance(state).wants_chunks(4)


@pytest.mark.parametrize("state", RELOADED)
def test_replaced_chunks_are_bound_and_verified_anew(state: State) -> None:
    instance = an_instance(state)
    if state is not State.BOUND:
        instance.verify(1.0)
    work = instance.attach(6, 2.0)
    if state is State.ATTACHED:
        assert (work, instance.state) == (None, State.ATTACHED)
        work = instance.on(SkeletonBuilt(), 2.5)
    assert work is Work.BIND
    assert instance.on(TensorsBound(), 3.0) is None, "what the former life verified does not count"
    assert instance.state is State.BOUND
    assert instance.verify(4.0) is Work.ACTIVATE
    assert instance.on(ModelActivated(), 4.5) is Work.ANNOUNCE
    assert instance.unhidden.bind_s == pytest.approx(0.5)


def test_chunks_may_be_replaced_as_often_as_the_agent_starts_again() -> None:
    instance = an_instance(State.BINDING)
    assert [instance.attach(epoch, 1.0) for epoch in (6, 7, 8)] == [Work.BIND] * 3
    assert not instance.wants_chunks(8)


@pytest.mark.parametrize("state", [s for s in State if WORKER_STATES[s] is WorkerState.LOADING])
def test_a_loading_instance_is_unloaded_at_once(state: State) -> None:
    instance = an_instance(state)
    assert instance.unload(0.0, is_idle=False, may_drain=False) is Work.UNLOAD
    assert instance.state is State.UNLOADING


def test_an_idle_instance_is_unloaded_at_once() -> None:
    assert an_instance(State.READY).unload(0.0, is_idle=True, may_drain=False) is Work.UNLOAD


def test_a_busy_instance_refuses_to_be_unloaded() -> None:
    instance = an_instance(State.READY)
    with pytest.raises(Conflict, match="has requests"):
        instance.unload(0.0, is_idle=False, may_drain=False)
    assert instance.state is State.READY


def test_a_busy_instance_drains_and_goes_with_its_last_request() -> None:
    instance = an_instance(State.READY)
    assert instance.end_of_requests(0.0) is None
    assert instance.unload(0.0, is_idle=False, may_drain=True) is None
    assert instance.state is State.DRAINING
    assert instance.unload(0.0, is_idle=False, may_drain=False) is None
    assert instance.end_of_requests(1.0) is Work.UNLOAD
    assert instance.unload(1.0, is_idle=True, may_drain=True) is None
    assert instance.on(Emptied(), 1.0) is Work.TELL_END


def test_the_first_failure_is_the_one_that_is_told() -> None:
    instance = an_instance(State.ATTACHED)
    assert instance.on(FAILED, 0.0) is Work.UNLOAD
    instance.on(WorkFailed(LoadFailed(model_id="m", reason="another")), 0.0)
    assert instance.error is FAILED.error


def test_work_that_ends_after_the_unload_was_asked_changes_nothing() -> None:
    instance = an_instance(State.BINDING)
    instance.verify(0.0)
    assert instance.unload(0.0, is_idle=True, may_drain=False) is Work.UNLOAD
    assert instance.on(TensorsBound(), 0.0) is None
    assert instance.state is State.UNLOADING
