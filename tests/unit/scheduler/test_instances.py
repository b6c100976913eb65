"""The instance state machine: every state with every event."""

from __future__ import annotations

import itertools

import pytest
from whimbrel.wire.messages import Tier
from whimbrel.wire.records import InstanceRecord, InstanceState

from services.scheduler.core.instances import TRANSITIONS, IllegalTransition, Instance, InstanceEvent

S, E = InstanceState, InstanceEvent
LEGAL = {
    (S.LOADING, E.BECAME_READY): S.READY,
    (S.LOADING, E.LOAD_FAILED): S.GONE,
    (S.LOADING, E.ENDED): S.GONE,
    (S.LOADING, E.LOST): S.GONE,
    (S.READY, E.EVICTED): S.UNLOADING,
    (S.READY, E.DRAINED): S.DRAINING,
    (S.READY, E.ENDED): S.GONE,
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


def test_the_table_is_total_and_only_gone_is_terminal() -> None:
    assert set(TRANSITIONS) == set(InstanceState)
    assert [state for state, row in TRANSITIONS.items() if not row] == [InstanceState.GONE]
