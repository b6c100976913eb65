"""Owns what is known of routers: who is alive, and in which life, so that nobody computes for a router that is gone."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire.errors import StaleEpoch


@dataclass(slots=True)
class _Router:
    epoch: int
    heard_at: float


class Routers:
    """A router is lost when nothing was heard of it for `lost_after_s`; `now` is in monotonic seconds."""

    def __init__(self, *, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._routers: dict[str, _Router] = {}

    def hear(self, router_id: str, epoch: int, now: float) -> bool:
        """A sign of life; says whether it is the first of a new life, after which nobody awaits the old one's requests.

        Raises StaleEpoch for a message of an earlier life.
        """
        known = self._routers.get(router_id)
        if known is None:
            self._routers[router_id] = _Router(epoch, now)
            return False
        if epoch < known.epoch:
            raise StaleEpoch(epoch=epoch, current_epoch=known.epoch)
        is_new_life = epoch > known.epoch
        known.epoch = epoch
        known.heard_at = now
        return is_new_life

    def take_lost(self, now: float) -> list[str]:
        """The routers that have just become lost; each is named once, and forgotten."""
        lost = [router_id for router_id, known in self._routers.items() if now - known.heard_at > self._lost_after_s]
        for router_id in lost:
            del self._routers[router_id]
        return lost

    def forgive(self, now: float) -> None:
        """It was this worker that could not hear: begin to count anew."""
        for known in self._routers.values():
            known.heard_at = now
