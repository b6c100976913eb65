"""Owns what the router knows of the workers' lives: epochs and the last sign of each, from their heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire.messages import WorkerHeartbeat

Worker = tuple[str, int]


@dataclass(slots=True)
class _Life:
    epoch: int | None
    heard_at: float


class WorkerWatch:
    """Watches workers, named by server and slot. Lost: silent for `silent_s_max`, or begun anew."""

    def __init__(self, silent_s_max: float) -> None:
        self._silent_s_max = silent_s_max
        self._lives: dict[Worker, _Life] = {}

    def expect(self, worker: Worker, now: float) -> None:
        """An instance is said to run there, so a sign is due even if none was ever heard."""
        self._lives.setdefault(worker, _Life(epoch=None, heard_at=now))

    def on_heartbeat(self, heartbeat: WorkerHeartbeat, now: float) -> bool:
        """Note a sign of life; True when it is of a new life, so that whatever the old one ran is lost."""
        worker = (heartbeat.server_id, heartbeat.slot)
        life = self._lives.setdefault(worker, _Life(epoch=None, heard_at=now))
        life.heard_at = now
        is_new_life = life.epoch is not None and heartbeat.epoch > life.epoch
        if life.epoch is None or is_new_life:
            life.epoch = heartbeat.epoch
        return is_new_life

    def take_lost(self, now: float) -> list[Worker]:
        """The workers that have just become silent for too long; each is told once."""
        lost = [worker for worker, life in self._lives.items() if now - life.heard_at >= self._silent_s_max]
        for worker in lost:
            del self._lives[worker]
        return lost

    def forgive(self, now: float) -> None:
        """We were the ones who could not hear (no bus): everybody gets the full time again."""
        for life in self._lives.values():
            life.heard_at = now
