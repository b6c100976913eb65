"""A clock of fillings that only a test moves: however long this machine takes, nothing stalls but what should."""

from __future__ import annotations

from functools import partial

import pytest

from services.storage_agent.filling import Filling

# By this clock, and how often fillings look at it, by the real one.
STALL_S_MAX = 0.02


class HandClock:
    """Seconds as fillings see them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("services.storage_agent.service.Filling", partial(Filling, clock=self))

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self, stalls: float) -> None:
        """So many times the longest that nothing may move."""
        self.now_s += stalls * STALL_S_MAX
