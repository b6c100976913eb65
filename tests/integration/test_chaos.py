"""A few cells of `make chaos`, so that the matrix itself does not rot between its runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from whimbrel.chassis.servers import ServerMissing

from tests.chaos.cell import run_cell
from tests.chaos.matrix import Cell, State, Victim, Way
from tests.chaos.world import a_world

CELLS = (
    Cell(Victim.SOURCE_WORKER, Way.KILL, State.RESUMING),
    Cell(Victim.DESTINATION_WORKER, Way.KILL, State.HANDOVER),
)


async def test_answers_stay_whole_when_a_source_dies_in_the_rounds_and_a_destination_in_the_handover(
    tmp_path: Path,
) -> None:
    try:
        async with a_world(tmp_path / "cluster") as world:
            for cell in CELLS:
                result = await run_cell(world, cell)
                assert result.is_passed, (cell.name, result.faults)
    except ServerMissing as missing:
        pytest.skip(str(missing))
