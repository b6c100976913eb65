"""The instance state machine: every state with every event."""

from __future__ import annotations

import itertools

import pytest
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import InstanceRecord, InstanceState

from services.scheduler.core.instances import TRANSITIONS, IllegalTransition, Instance, InstanceEvent, Running

S, E = InstanceState, InstanceEvent
LEGAL = {
    (S.LOADING, E.BECAME_READY): S.READY,
    (S.LOADING, E.LOAD_FAILED): S.GONE,
    (S.LOADING, E.ENDED): S.GONE,
    (S.LOADING, E.LOST): S.GONE,
    (S.READY, E.EVICTED): S.UNLOADING,
    (S.READY, E.DRAINED): S.DRAINING,
    (S.READY, E.ENDED): S.GONE,
    (S.READY, E.PREEMPTED): S.DRAINING,
    (S.READY, E.LOST): S.GONE,
    (S.DRAINING, E.ENDED): S.GONE,
    (S.DRAINING, E.LOST): S.GONE,
    (S.UNLOADING, E.UNLOAD_REFUSED): S.READY,
    (S.UNLOADING, E.ENDED): S.GONE,
    (S.UNLOADING, E.LOST): S.GONE,
}


def an_instance(state: InstanceState) -> Instance:
    record = InstanceRecord(
        instance_id="ins-1",
        model_id="a",
        checkpoint_digest="d",
        server_id="s0",
        slot=0,
        state=state,
        task_id="task-1",
        source_tier=Tier.SSD,
        estimate_s=1.0,
        stages=None,
    )
    return Instance(record=record, size_bytes=1, placed_s=0.0)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(S, E)), ids=str)
def test_every_state_takes_the_legal_events_and_refuses_the_others(state: InstanceState, event: InstanceEvent) -> None:
    instance = an_instance(state)
    if (state, event) in LEGAL:
        assert instance.accepts(event)
        instance.enter(event)
        assert instance.state is LEGAL[state, event]
    else:
        assert not instance.accepts(event)
        with pytest.raises(IllegalTransition, match=f"{state} can't take {event}"):
            instance.enter(event)
        assert instance.state is state, "the machine does not move"


@pytest.mark.parametrize(
    ("news", "count"),
    [
        pytest.param("+a", 1, id="a start"),
        pytest.param("+a +a", 1, id="the same start again"),
        pytest.param("+a -a", 0, id="start and end"),
        pytest.param("1 +a -a", 0, id="counted before its start was told"),
        pytest.param("+a 1 -a", 0, id="counted after its start was told"),
        pytest.param("2 +a +b +c", 3, id="more starts than counted"),
        pytest.param("+a 0", 0, id="a lost end"),
        pytest.param("+a +b 1 -b", 0, id="a lost end, and it is not known whose"),
        pytest.param("2 -a", 1, id="a lost start"),
        pytest.param("-a", 0, id="a lost start, and no count"),
    ],
)
def test_the_requests_of_a_router_are_counted_whatever_crosses_or_gets_lost(news: str, count: int) -> None:
    """R5: `+` is a start, `-` an end, a number the router's count."""
    running = Running()
    for word in news.split():
        if word[0] == "+":
            running.start(word, 5, 1.0)
        elif word[0] == "-":
            running.finish("+" + word[1:], 2.0)
        else:
            running.correct(int(word))
    assert running.count == count


def test_the_table_is_total_and_only_gone_is_terminal() -> None:
    assert set(TRANSITIONS) == set(InstanceState)
    assert [state for state, row in TRANSITIONS.items() if not row] == [InstanceState.GONE]
