"""What the worker knows of routers: lives, and who is lost."""

from __future__ import annotations

import pytest
from whimbrel.wire.errors import StaleEpoch

from services.gpu_worker.core.routers import Routers


def test_a_router_that_is_heard_is_not_lost() -> None:
    routers = Routers(lost_after_s=3.0)
    assert not routers.hear("a", 1, 0.0)
    assert not routers.hear("a", 1, 2.0)
    assert routers.take_lost(5.0) == []


def test_a_silent_router_is_lost_once() -> None:
    routers = Routers(lost_after_s=3.0)
    routers.hear("a", 1, 0.0)
    routers.hear("b", 1, 2.0)
    assert routers.take_lost(3.5) == ["a"]
    assert routers.take_lost(3.5) == []
    assert not routers.hear("a", 1, 4.0)


def test_a_new_life_is_noticed_once_and_an_old_one_refused() -> None:
    routers = Routers(lost_after_s=3.0)
    routers.hear("a", 1, 0.0)
    assert routers.hear("a", 2, 1.0)
    assert not routers.hear("a", 2, 1.0)
    with pytest.raises(StaleEpoch, match="epoch 1 is over"):
        routers.hear("a", 1, 1.0)


def test_nobody_is_lost_because_this_worker_could_not_hear() -> None:
    routers = Routers(lost_after_s=3.0)
    routers.hear("a", 1, 0.0)
    routers.forgive(10.0)
    assert routers.take_lost(12.0) == []
