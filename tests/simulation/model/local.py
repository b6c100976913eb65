"""Owns the states of single processes: each is kept once, under a number, and what it does with an input is worked out
once, however many states of the whole cluster it is part of.

The processes are real objects. A state is kept as the bytes that it can be made from again, and is recognised by
everything that is in it: two objects are in one state when they are the same all the way down, also in what refers to
what.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import FunctionType
from typing import Any, NamedTuple

import msgspec
from whimbrel.wire.codec import error_of, error_reply
from whimbrel.wire.errors import WhimbrelError

_ATOMS = (int, float, str, bytes, bool, type(None), Enum)


def digest(value: object) -> bytes:
    """The same for what is the same."""
    return hashlib.blake2b(repr(_plain(value, {})).encode(), digest_size=16).digest()


def _plain(value: Any, seen: dict[int, int]) -> Any:
    if isinstance(value, _ATOMS):
        return value
    kind = type(value)
    if kind in (tuple, list, deque):
        return kind is tuple, [_plain(each, seen) for each in value]
    if kind is dict:
        return [(_plain(key, seen), _plain(each, seen)) for key, each in value.items()]
    if kind in (set, frozenset):
        return sorted(repr(_plain(each, seen)) for each in value)
    if isinstance(value, tuple):
        return kind.__name__, [_plain(each, seen) for each in value]
    if isinstance(value, type | FunctionType):
        return value.__qualname__
    if id(value) in seen:
        return "again", seen[id(value)]
    if not (isinstance(value, msgspec.Struct) and value.__struct_config__.frozen):
        # Which of two that are equal is meant makes a difference only when they can change.
        seen[id(value)] = len(seen)
    return kind.__name__, [(name, _plain(getattr(value, name), seen)) for name in _names(value)]


def _names(value: Any) -> list[str]:
    if isinstance(value, msgspec.Struct):
        return list(value.__struct_fields__)
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names = [*slots, *getattr(value, "__dict__", {})]
    return [name for name in names if hasattr(value, name)]


class _Pickler(pickle.Pickler):
    """Errors are made of their fields."""

    def reducer_override(self, value: Any) -> Any:
        return (error_of, (error_reply(value),)) if isinstance(value, WhimbrelError) else NotImplemented


def _pickled(process: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(process)
    return buffer.getvalue()


class Done(NamedTuple):
    """What an input led to: the state after it, and the numbers of the messages that were sent, each with its receiver;
    or the failure that it was."""

    state: int
    sent: tuple[tuple[str, int], ...]
    failure: str | None = None


class Messages:
    """All messages that were ever sent, by number."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, bytes], int] = {}
        self._all: list[Any] = []

    def __getitem__(self, number: int) -> Any:
        return self._all[number]

    def number(self, message: Any) -> int:
        key = type(message).__name__, digest(message)
        if key not in self._numbers:
            self._numbers[key] = len(self._all)
            self._all.append(message)
        return self._numbers[key]


class States:
    """All states that processes were ever in, by number, with facts about each."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._numbers: dict[bytes, int] = {}
        self._bytes: list[bytes] = []
        self._done: dict[tuple[int, Any], Done] = {}
        self._facts: dict[tuple[int, Any], Any] = {}

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def transitions(self) -> int:
        return len(self._done)

    def number(self, process: Any) -> int:
        key = digest(process)
        if key not in self._numbers:
            self._numbers[key] = len(self._bytes)
            self._bytes.append(_pickled(process))
        return self._numbers[key]

    def process(self, state: int) -> Any:
        """A copy of its own."""
        return pickle.loads(self._bytes[state])

    def fact(self, state: int, read: Callable[[Any], Any], *args: Any) -> Any:
        """What `read` says of the process in this state."""
        key = state, (read, args)
        if key not in self._facts:
            self._facts[key] = read(self.process(state), *args)
        return self._facts[key]

    def after(self, state: int, act: Callable[..., None], *args: Any) -> Done:
        """What `act` of the process, an input with its arguments, leads to."""
        key = state, (act, args)
        done = self._done.get(key)
        if done is None:
            done = self._done[key] = self._worked_out(state, act, args)
        return done

    def after_hearing(self, state: int, act: Callable[..., None], number: int, now: float) -> Done:
        """The same, of a message by its number."""
        key = state, (act, number, now)
        done = self._done.get(key)
        if done is None:
            done = self._done[key] = self._worked_out(state, act, (self._messages[number], now))
        return done

    def _worked_out(self, state: int, act: Callable[..., None], args: tuple[Any, ...]) -> Done:
        process = self.process(state)
        try:
            act(process, *args)
            process.check()
        except Exception as failure:
            return Done(state, (), f"{type(failure).__name__}: {failure}")
        sent = tuple((to, self._messages.number(message)) for to, message in process.out)
        process.out.clear()
        return Done(self.number(process), sent)
