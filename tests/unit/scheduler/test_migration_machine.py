"""The machine of a migration: its table, and how rounds end."""

from __future__ import annotations

import itertools

import pytest
from whimbrel.wire.messages import (
    MigrationState,
)
from whimbrel.wire.records import MigrationRecord, ResumeRecord

from services.scheduler.core.migration import (
    PAUSE_S_MAX,
    ROUNDS_MAX,
    TRANSITIONS,
    AfterRound,
    IllegalTransition,
    Migration,
    MigrationEvent,
    after_round,
    gap_tokens_max,
)


def test_the_table_is_total_and_three_states_are_terminal() -> None:
    """G13"""
    assert set(TRANSITIONS) == set(MigrationState)
    terminal = {state for state, row in TRANSITIONS.items() if not row}
    assert terminal == {MigrationState.FINISHED, MigrationState.ABANDONED, MigrationState.REQUEUED}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(MigrationState, MigrationEvent)))
def test_every_pair_of_state_and_event_is_legal_or_raises(state: MigrationState, event: MigrationEvent) -> None:
    """G13"""
    record = MigrationRecord(
        migration_id="mig-1",
        model_id="a",
        state=state,
        source_instance_id="i1",
        source_server_id="s0",
        source_slot=0,
        destination_instance_id="i2",
        destination_server_id="s1",
        destination_slots=(0,),
        reason="placement",
    )
    migration = Migration(record=record, started_s=0.0, progress_s=0.0)
    if event in TRANSITIONS[state]:
        assert migration.accepts(event)
        migration.enter(event)
        assert migration.state is TRANSITIONS[state][event]
    else:
        assert not migration.accepts(event)
        with pytest.raises(IllegalTransition):
            migration.enter(event)
        assert migration.state is state


def test_until_the_handover_every_end_leaves_the_source_as_it_was_and_from_then_on_none_does() -> None:
    """X2, X3, X4, X5"""
    for state in (MigrationState.PREPARING, MigrationState.RESUMING):
        assert MigrationState.REQUEUED not in TRANSITIONS[state].values()
        assert MigrationState.FINISHED not in TRANSITIONS[state].values()
    assert MigrationState.ABANDONED not in TRANSITIONS[MigrationState.HANDOVER].values()


KNOWN = ResumeRecord(
    model_id="a",
    device="cpu",
    seconds_per_token=0.002,
    overhead_s=0.01,
    covariance=(0.0, 0.0, 0.0, 0.0),
    observations=10,
    token_s=0.02,
)


@pytest.mark.parametrize(
    ("round_number", "gap_tokens", "before_tokens", "expected"),
    [
        pytest.param(1, 10, None, AfterRound.HAND_OVER, id="a gap that costs a decode step"),
        pytest.param(1, 11, None, AfterRound.ANOTHER_ROUND, id="a gap that costs more"),
        pytest.param(2, 40, 400, AfterRound.ANOTHER_ROUND, id="it shrinks"),
        pytest.param(2, 40, 40, AfterRound.HAND_OVER, id="it does not shrink, but is small"),
        pytest.param(2, 4000, 40, AfterRound.GIVE_UP, id="it grows, and would pause clients for long"),
        pytest.param(ROUNDS_MAX, 40, 41, AfterRound.HAND_OVER, id="the last round, bearable"),
        pytest.param(ROUNDS_MAX, 4000, 4001, AfterRound.GIVE_UP, id="the last round, unbearable"),
    ],
)
def test_rounds_end_when_the_gap_is_small_or_does_not_shrink(
    round_number: int, gap_tokens: int, before_tokens: int | None, expected: AfterRound
) -> None:
    """G7"""
    decided = after_round(round=round_number, gap_tokens=gap_tokens, before_tokens=before_tokens, known=KNOWN)
    assert decided is expected
    if decided is AfterRound.HAND_OVER:
        assert KNOWN.seconds_per_token * gap_tokens + KNOWN.overhead_s <= PAUSE_S_MAX


def test_a_gap_of_two_is_always_small_enough() -> None:
    slow = ResumeRecord(
        model_id="a",
        device="cpu",
        seconds_per_token=1.0,
        overhead_s=0.0,
        covariance=(0.0, 0.0, 0.0, 0.0),
        observations=0,
    )
    assert gap_tokens_max(slow) == 2
