"""Scenarios that are told as texts: each decision of a policy with every term must be word for word what its file says.

`pytest tests/scenarios --rewrite` writes the outputs anew; the difference is then to be reviewed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from whimbrel.wire.messages import Tier

from services.scheduler.core.decisions import Decision, Deferred, Placement
from services.scheduler.core.policies import POLICIES
from tests.scenarios.story import StoryError, retell

FILES = sorted(Path(__file__).parent.glob("*.txt"))


def told(name: str) -> list[Decision]:
    return retell((Path(__file__).parent / f"{name}.txt").read_text())[1]


def check(path: Path, *, is_rewriting: bool) -> None:
    text = path.read_text()
    now, _ = retell(text)
    if is_rewriting:
        path.write_text(now)
    else:
        assert now.splitlines() == text.splitlines(), f"{path.name}: if this is meant, run pytest with --rewrite"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_decisions_are_what_the_story_says(path: Path, is_rewriting: bool) -> None:
    """C7, C8"""
    check(path, is_rewriting=is_rewriting)


def test_in_figure_3_a_moves_to_s1_and_b_starts_on_s2_from_dram() -> None:
    """C7: whatever the text says, this must be so; and neither of the two waits long."""
    (decision,) = told("figure3_migration")
    assert isinstance(decision, Placement)
    assert (decision.server_id, decision.estimate.source_tier) == ("S2", Tier.DRAM)
    (move,) = decision.moves
    assert (move.instance_id, move.server_id) == ("a1", "S1")
    assert move.load is not None
    assert move.load.source_tier is Tier.DRAM
    assert move.pause_s <= 0.1, "A goes on where it is while it loads at S1"
    (stopping,) = told("figure3_preemption")
    assert isinstance(stopping, Placement)
    (stop_s,) = [one.stop_s for one in stopping.reasons.candidates() if one.server_id == "S2"]
    assert move.pause_s < stop_s / 5, "what the client of A would see, were A stopped"
    (slow,) = told("figure3_availability")
    assert isinstance(slow, Placement)
    assert decision.cost_s < slow.cost_s / 2, "B waits less than for its load from SSD, A's pause included"


def test_in_figure_3_every_policy_has_an_answer_of_its_own() -> None:
    """C8: the same cluster, the same estimates, and five policies."""
    first = {policy: told(f"figure3_{policy}")[0] for policy in POLICIES}
    waiting = first.pop("locality")
    assert isinstance(waiting, Deferred)
    assert waiting.wait_for == "S2"
    placed = {policy: one for policy, one in first.items() if isinstance(one, Placement)}
    assert {policy: one.server_id for policy, one in placed.items()} == {
        "availability": "S1",
        "random": "S1",
        "preemption": "S2",
        "migration": "S2",
    }
    assert {policy for policy, one in placed.items() if one.stopped} == {"preemption"}
    assert {policy for policy, one in placed.items() if one.moves} == {"migration"}


def test_another_output_is_noticed_and_rewritten_without_changing_the_story(tmp_path: Path) -> None:
    good = FILES[0].read_text()
    path = tmp_path / "story.txt"
    path.write_text(good.replace("cost ", "cost 1"))
    with pytest.raises(AssertionError, match="--rewrite"):
        check(path, is_rewriting=False)
    check(path, is_rewriting=True)
    assert path.read_text() == good
    check(path, is_rewriting=False)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("model A, 1 GB\nthe model B, 1 GB\n", "line 2: 'the model B, 1 GB' is none", id="an unknown line"),
        pytest.param("A is requested, policy random\n----\n", "line 1: .*nobody has told of 'A'", id="unknown model"),
        pytest.param("gpu 0, 1 GB\n", "line 1: name a server first", id="a gpu of no server"),
        pytest.param("model A, 1 GB\n----\n", "line 2: a request comes before", id="no request"),
        pytest.param("model A, 1 GB\nA is requested, policy random\n", "ends with a request", id="no output"),
        pytest.param("", "ends with a request", id="nothing"),
    ],
)
def test_a_story_that_says_nothing_is_an_error_and_no_success(text: str, complaint: str) -> None:
    with pytest.raises(StoryError, match=complaint):
        retell(text)
