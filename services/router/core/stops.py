"""Owns stop strings: where the text ends, and how much of it must be held back because a stop may have begun.

The output ends before the stop string that is complete first (the longest of those that are complete at the same
character). That depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations


class StopMatcher:
    """Fed text piece by piece; `is_stopped` once a stop string was complete, and nothing comes out any more."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def feed(self, text: str) -> str:
        """The text that is sure to be output: it ends before a stop string, or before what may become one."""
        if self.is_stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        cut = _first_stop(text, self._stops)
        if cut is not None:
            self.is_stopped = True
            self._held = ""
            return text[:cut]
        sure = len(text) - _possible_prefix_length(text, self._stops)
        self._held = text[sure:]
        return text[:sure]

    def flush(self) -> str:
        """What was held back, when no more text comes: no stop string can be completed any more."""
        held, self._held = self._held, ""
        return held


def _first_stop(text: str, stops: tuple[str, ...]) -> int | None:
    """Where the stop string begins that ends first in `text`; the earliest beginning of those that end together."""
    found = [(text.find(stop), len(stop)) for stop in stops]
    ends = [(begin + length, begin) for begin, length in found if begin >= 0]
    return min(ends)[1] if ends else None


def _possible_prefix_length(text: str, stops: tuple[str, ...]) -> int:
    """Characters at the end of `text` that begin a stop string."""
    longest = min(len(text), max(len(stop) for stop in stops) - 1)
    for length in range(longest, 0, -1):
        end = text[-length:]
        if any(stop.startswith(end) for stop in stops):
            return length
    return 0
