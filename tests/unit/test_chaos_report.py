"""What the chaos matrix says of its cells: in which state a harm came, and the page that is written."""

from __future__ import annotations

import pytest

from tests.chaos import report
from tests.chaos.client import Client
from tests.chaos.matrix import HARMS, Cell, Result, State, Victim, Way, choose_cells
from tests.chaos.timeline import Timeline

ENTERED = {"preparing": 10.0, "resuming": 11.0, "handover": 12.0, "finished": 12.1}
KILLED = Cell(Victim.SOURCE_WORKER, Way.KILL, State.RESUMING)


@pytest.mark.parametrize(
    ("struck_s", "state"),
    [(9.0, ""), (10.5, "preparing"), (11.0, "resuming"), (11.998, "resuming or handover"), (13.0, "finished")],
)
def test_a_harm_came_in_the_state_that_was_entered_last_before_it(struck_s: float, state: str) -> None:
    assert Timeline(entered=ENTERED).state_at(struck_s) == state


def test_every_harm_meets_every_state_once() -> None:
    cells = choose_cells()
    assert len(cells) == len(set(cells)) == len(HARMS) * len(State)


def test_words_choose_victims_ways_and_states() -> None:
    chosen = choose_cells(only="redis, worker killed", states="handover")
    assert [(cell.victim, cell.way) for cell in chosen] == [
        (Victim.SOURCE_WORKER, Way.KILL),
        (Victim.DESTINATION_WORKER, Way.KILL),
        (Victim.REDIS, Way.KILL),
        (Victim.REDIS, Way.PAUSE),
    ]


def test_the_page_names_end_pause_and_the_state_in_which_the_harm_really_came() -> None:
    result = Result(cell=KILLED, struck="handover", end="abandoned", cause="source lost", longest_pause_s=1.25)
    page = report.render([result], [KILLED], "2 processors")
    assert "| source's worker killed | not run | abandoned (source lost), 1.25 s, in handover | not run |" in page
    assert "1 cells, 1 run, 1 passed" in page
    assert page.endswith("## Cells that failed\n\nNone.\n")


def test_the_page_tells_what_was_wrong_with_a_cell() -> None:
    result = Result(cell=KILLED, struck="resuming", faults=("the stream does not end",))
    page = report.render([result], [KILLED], "2 processors")
    assert "**failed**" in page
    assert page.endswith("* source's worker killed, resuming: the stream does not end\n")


def test_a_client_knows_a_text_that_is_whole_from_one_that_was_cut_and_one_that_is_wrong() -> None:
    client = Client("http://nowhere", "0 1 2")
    client.text, client.finish_reason = "0 1 2", "stop"
    assert client.is_whole
    client.text, client.finish_reason, client.cut = "0 1", None, "the connection ended"
    assert (client.is_whole, client.is_cut_short) == (False, True)
    client.text = "0 2"
    assert not client.is_cut_short
    assert "wrong from character 2" in client.outcome()
