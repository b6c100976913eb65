"""Configuration from the environment."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import pytest
from whimbrel.chassis.config import ConfigError, from_env, parse_size


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    server_id: str
    slot: int = 0
    keep_alive_s: float = 60.0
    is_loud: bool = False
    pool_bytes: int = 1024
    limit_bytes: int | None = None
    cache_dir: Path = Path("/var/cache")
    pool_path: Path | None = None
    colour: Colour = Colour.RED
    tags: tuple[str, ...] = field(default=(), init=False)


def test_every_kind_of_field_is_read_from_its_variable() -> None:
    config = from_env(
        Config,
        {
            "WB_SERVER_ID": "s1",
            "WB_SLOT": "3",
            "WB_KEEP_ALIVE_S": "2.5",
            "WB_IS_LOUD": "Yes",
            "WB_POOL_BYTES": "512MiB",
            "WB_LIMIT_BYTES": "2GiB",
            "WB_CACHE_DIR": "~/cache",
            "WB_POOL_PATH": "/dev/shm/pool",
            "WB_COLOUR": "blue",
        },
    )
    assert config == Config(
        server_id="s1",
        slot=3,
        keep_alive_s=2.5,
        is_loud=True,
        pool_bytes=512 * 2**20,
        limit_bytes=2 * 2**30,
        cache_dir=Path.home() / "cache",
        pool_path=Path("/dev/shm/pool"),
        colour=Colour.BLUE,
    )


@pytest.mark.parametrize("unset", [{}, {"WB_SLOT": "", "WB_POOL_PATH": "  ", "X_SLOT": "9"}], ids=["unset", "empty"])
def test_a_variable_that_is_unset_or_empty_leaves_the_default(unset: dict[str, str]) -> None:
    assert from_env(Config, {"WB_SERVER_ID": "s1", **unset}) == Config(server_id="s1")


def test_the_prefix_can_be_chosen() -> None:
    assert from_env(Config, {"X_SERVER_ID": "s1", "WB_SERVER_ID": "no"}, prefix="X_").server_id == "s1"


def test_a_missing_variable_without_default_is_named() -> None:
    with pytest.raises(ConfigError, match="WB_SERVER_ID: is not set and has no default; it takes text"):
        from_env(Config, {})


@pytest.mark.parametrize(
    ("variable", "text", "wanted"),
    [
        ("WB_SLOT", "one", "a whole number"),
        ("WB_SLOT", "1.5", "a whole number"),
        ("WB_SLOT", "512MiB", "a whole number"),
        ("WB_KEEP_ALIVE_S", "soon", "a number"),
        ("WB_KEEP_ALIVE_S", "nan", "a number"),
        ("WB_KEEP_ALIVE_S", "inf", "a number"),
        ("WB_IS_LOUD", "maybe", "true or false"),
        ("WB_POOL_BYTES", "lots", "a size such as"),
        ("WB_LIMIT_BYTES", "2 pigs", "a size such as"),
        ("WB_COLOUR", "green", "one of red, blue"),
    ],
)
def test_a_value_that_cannot_be_used_is_an_error_that_says_what_can(variable: str, text: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_env(Config, {"WB_SERVER_ID": "s1", variable: text})
    assert raised.value.variable == variable
    assert repr(text) in str(raised.value)
    assert wanted in str(raised.value)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1B", 1),
        ("2kB", 2000),
        ("2KB", 2000),
        ("3 MB", 3_000_000),
        ("1.5GiB", 3 * 2**29),
        ("0.1MB", 100_000),
        ("16KiB", 16384),
        ("1TiB", 2**40),
        (" 7 ", 7),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "1.0001B", "1e6", "GiB", "1 GiB GiB", "1Gib", "0x10"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_size(text)
