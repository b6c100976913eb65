"""Owns configuration: frozen dataclasses filled from environment variables, with errors that name the variable."""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?")
_UNITS_BYTES = {
    None: 1, "B": 1,
    "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_BOOLEANS = {
    "1": True, "true": True, "yes": True, "on": True,
    "0": False, "false": False, "no": False, "off": False,
}  # fmt: skip


class ConfigError(Exception):
    """An environment variable is missing or cannot be used; the text names it and says what would be."""

    def __init__(self, variable: str, reason: str) -> None:
        super().__init__(f"{variable}: {reason}")
        self.variable = variable
        self.reason = reason


def from_env(cls: type[T], environ: Mapping[str, str], prefix: str = "WB_") -> T:
    """A `cls` (a dataclass) whose field `size_bytes` comes from `WB_SIZE_BYTES`, and so on for every field.

    A variable that is unset or empty leaves the field's default; without a default it is a ConfigError. Fields may be
    str, int, float, bool, Path, an Enum, or one of these with `| None`. Integers named `…_bytes` take "512MiB" too.
    """
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if not field.init:
            continue
        variable = prefix + field.name.upper()
        text = environ.get(variable, "").strip()
        if text:
            values[field.name] = _parse(variable, text, hints[field.name])
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(variable, f"is not set and has no default; it takes {_describe(hints[field.name])}")
    return cls(**values)


def parse_size(text: str) -> int:
    """Bytes of "4096", "512MiB", "1.5 GB"; raises ValueError for anything else."""
    matched = _SIZE.fullmatch(text.strip())
    if matched is None:
        raise ValueError(f"{text!r} is no size; write bytes, or a number with kB, MB, GB, KiB, MiB or GiB")
    size_bytes = Fraction(matched[1]) * _UNITS_BYTES[matched[2]]
    if size_bytes.denominator != 1:
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(size_bytes)


def _parse(variable: str, text: str, kind: Any) -> Any:
    kind = _without_none(kind)
    try:
        if kind is bool:
            return _BOOLEANS[text.lower()]
        if kind is int:
            return parse_size(text) if variable.endswith("_BYTES") else int(text)
        if kind is float:
            return _finite(text)
        if kind is Path:
            return Path(text).expanduser()
        if kind is str or (isinstance(kind, type) and issubclass(kind, Enum)):
            return kind(text)
    except (ValueError, KeyError):
        raise ConfigError(variable, f"{text!r} is not usable; it takes {_describe(kind, variable)}") from None
    raise AssertionError(f"the field of {variable} has a type that the environment cannot give: {kind}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _without_none(kind: Any) -> Any:
    """`X` of `X | None`."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    return kind


def _describe(kind: Any, variable: str = "") -> str:
    kind = _without_none(kind)
    if kind is bool:
        return "true or false"
    if kind is int and variable.endswith("_BYTES"):
        return "a size such as 1048576, 512MiB or 2GiB"
    if kind is int:
        return "a whole number"
    if kind is float:
        return "a number"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    return "a path" if kind is Path else "text"
