"""Owns the names under which tests and rehearsals find the in-memory twins of bus and store."""

from __future__ import annotations

from whimbrel.chassis.memory_bus import InMemoryBus, InMemoryHub, matches
from whimbrel.chassis.memory_store import InMemoryData, InMemoryStore

__all__ = ["InMemoryBus", "InMemoryData", "InMemoryHub", "InMemoryStore", "matches"]
