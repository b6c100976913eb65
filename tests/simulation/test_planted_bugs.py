"""Does the simulation find anything? Each planted bug is found within a few seeds."""

from __future__ import annotations

import pytest

from tests.simulation.chaos import Life
from tests.simulation.planted import PLANTED, Planted

SEEDS_MAX = 12
STEPS = 1500


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.what)
def test_a_planted_bug_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it breaks: an invariant, an assertion of the core itself, or that everybody is served."""
    is_static = planted.name in vars(planted.owner)
    assert is_static, f"{planted.owner}.{planted.name} is not there any more"
    monkeypatch.setattr(planted.owner, planted.name, planted.make(vars(planted.owner)[planted.name]))
    for seed in range(SEEDS_MAX):
        try:
            Life(seed).live(STEPS)
        except Exception as found:
            print(f"seed {seed}: {type(found).__name__}: {found}"[:300])
            return
    pytest.fail(f"{planted.what}: not found in {SEEDS_MAX} seeds")
