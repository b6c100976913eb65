"""Owns what an agent says of its residency: all of it while that is short, else what changed, by version (P2).

Each change raises the version. An entry of a delta is what is true now of a checkpoint, not a difference, so hearing
it twice does no harm; one with nothing left in any tier says that it is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from whimbrel.wire.messages import ResidentModel, Tier

# So many entries (about 10 kB) are told as a whole with every heartbeat, which repairs whatever was lost.
WHOLE_ENTRIES_MAX = 64
# A delta reaches back so many heartbeats: who missed fewer in a row needs no resync.
HEARTBEATS_COVERED = 8

Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What goes into a heartbeat: see `AgentHeartbeat`."""

    resident: tuple[ResidentModel, ...]
    version: int
    base_version: int | None


class ResidencyNews:
    """Turns the residency of every heartbeat into news. `told` are the versions of the last heartbeats."""

    def __init__(self) -> None:
        self._known: dict[Key, ResidentModel] = {}
        self._changed: dict[Key, int] = {}
        self._version = 0
        self._told: deque[int] = deque(maxlen=HEARTBEATS_COVERED)
        self._is_whole_asked = True  # the first heartbeat of a life says everything

    def ask_whole(self) -> None:
        """Somebody missed too much: the next news are everything."""
        self._is_whole_asked = True

    def tell(self, resident: Iterable[ResidentModel]) -> News:
        """The news of this heartbeat."""
        self._note({(model.model_id, model.checkpoint_digest): model for model in resident})
        is_whole = self._is_whole_asked or len(self._known) <= WHOLE_ENTRIES_MAX
        base = None if is_whole or not self._told else self._told[0]
        self._told.append(self._version)
        self._is_whole_asked = False
        if base is None:
            return News(resident=tuple(self._known.values()), version=self._version, base_version=None)
        changed = tuple(self._known.get(key) or _gone(key) for key, version in self._changed.items() if version > base)
        return News(resident=changed, version=self._version, base_version=base)

    def _note(self, now: dict[Key, ResidentModel]) -> None:
        changed = [key for key in {**self._known, **now} if self._known.get(key) != now.get(key)]
        if changed:
            self._version += 1
            self._changed.update(dict.fromkeys(changed, self._version))
            self._known = now
        oldest = self._told[0] if self._told else 0
        gone = [key for key, version in self._changed.items() if version <= oldest and key not in now]
        for key in gone:
            del self._changed[key]


def _gone(key: Key) -> ResidentModel:
    model_id, checkpoint_digest = key
    return ResidentModel(model_id=model_id, checkpoint_digest=checkpoint_digest, tier=Tier.REMOTE, size_bytes=0)
