"""Owns what is known while models are looked for in the repository: who was asked, and what was found so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from whimbrel.wire.messages import RepositoryModelFound


@dataclass(slots=True, kw_only=True, eq=False)
class Search:
    """Times are monotonic seconds. `found` has the models by the agent that named them, and their id.

    `known_models` and `known_instances` are those of this life of ours: what is deleted or has ended since does not
    come back by late news. `finished_s` is when a whole report was there.
    """

    began_s: float
    asked: str | None = None
    asked_s: float = -inf
    heard_s: float = -inf
    found: dict[str, dict[str, RepositoryModelFound]] = field(default_factory=dict)
    known_models: set[str] = field(default_factory=set)
    known_instances: set[str] = field(default_factory=set)
    finished_s: float | None = None
