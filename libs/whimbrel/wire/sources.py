"""Owns the grammar of sources: what a model can be imported from, and how a source is told without its secrets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from whimbrel.wire.errors import InvalidRequest

# Longer than every path that a file system takes.
SOURCE_CHARACTERS_MAX = 4096

GRAMMAR = (
    "an absolute path of a directory that the servers can read, hf://org/name[@revision], s3://bucket/prefix, or "
    "http(s)://host/directory/"
)

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(?:/[A-Za-z0-9][A-Za-z0-9_.-]*)?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
_WEIGHTS = re.compile(r".*\.(?:safetensors|bin|pt|pth|gguf)", re.IGNORECASE)


class SourceKind(StrEnum):
    DIRECTORY = "directory"
    HUB = "hub"
    STORE = "store"
    WEB = "web"


_KINDS = {
    "": SourceKind.DIRECTORY,
    "file": SourceKind.DIRECTORY,
    "hf": SourceKind.HUB,
    "s3": SourceKind.STORE,
    "gs": SourceKind.STORE,
    "az": SourceKind.STORE,
    "http": SourceKind.WEB,
    "https": SourceKind.WEB,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source that was understood. `location` is a path, `org/name` on a hub, or a URL without a slash at its end.

    `user` and `password` came with a URL; they are in no other field. `revision` is of a hub only.
    """

    kind: SourceKind
    location: str
    revision: str | None = None
    user: str | None = None
    password: str | None = None

    def __repr__(self) -> str:
        return f"Source({self.kind}, {self.location!r}, revision={self.revision!r})"


def parse_source(text: str) -> Source:
    """What `text` names; raises InvalidRequest for the field `source`, without the secrets that may be in it."""
    if not text.strip():
        _refuse(f"is empty; give {GRAMMAR}")
    if len(text) > SOURCE_CHARACTERS_MAX or any(ord(character) < 32 for character in text):
        _refuse(f"is too long or has control characters; give {GRAMMAR}")
    if text.startswith("/"):
        return Source(kind=SourceKind.DIRECTORY, location=text)
    parts = _split(text)
    if parts is None or parts.scheme not in _KINDS or not parts.scheme:
        _refuse(f"{redacted(text)!r} is not understood; give {GRAMMAR}")
    if parts.scheme == "hf":
        return _hub(text.removeprefix("hf://"))
    if parts.query or parts.fragment:
        _refuse(f"{redacted(text)!r} must not have a '?' or '#' part; give {GRAMMAR}")
    if parts.scheme == "file":
        return _file(parts)
    return _url(parts)


def redacted(text: str) -> str:
    """A source as it may be told to anybody: without user, password, query and fragment of a URL."""
    if "://" not in text:
        return text
    parts = _split(text)
    if parts is None:
        return f"{text.split('://', 1)[0]}://…"
    if parts.scheme == "hf":
        return text.split("?", 1)[0].split("#", 1)[0]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _split(text: str) -> SplitResult | None:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return None
    return parts


def _hub(text: str) -> Source:
    name, at, revision = text.rstrip("/").partition("@")
    if _HUB_NAME.fullmatch(name) is None or "--" in name or ".." in name:
        _refuse(f"'hf://{name}' names no model of a hub; give hf://org/name or hf://org/name@revision")
    if at and (_REVISION.fullmatch(revision) is None or ".." in revision):
        told = redacted(f"hf://{revision}").removeprefix("hf://")
        _refuse(f"{told!r} is no revision; give a branch, a tag or a commit: hf://{name}@main")
    return Source(kind=SourceKind.HUB, location=name, revision=revision or None)


def _file(parts: SplitResult) -> Source:
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost") or not path.startswith("/"):
        _refuse("a file:// URL needs an absolute path, as in file:///models/name")
    return Source(kind=SourceKind.DIRECTORY, location=path)


def _url(parts: SplitResult) -> Source:
    url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path.rstrip("/"), "", ""))
    if not parts.hostname:
        _refuse(f"{url!r} names no host or bucket; give {GRAMMAR}")
    if _WEIGHTS.fullmatch(parts.path):
        directory = url.rsplit("/", 1)[0]
        _refuse(f"{url!r} is one file; a model has a config and a tokenizer too: give its directory, {directory}/")
    kind = _KINDS[parts.scheme]
    if kind is SourceKind.STORE and parts.username is not None:
        _refuse(f"{url!r}: credentials of a store are settings of the storage agents (AWS_*), not part of its URL")
    user, password = (None if each is None else unquote(each) for each in (parts.username, parts.password))
    return Source(kind=kind, location=url, user=user, password=password)


def _refuse(reason: str) -> NoReturn:
    raise InvalidRequest(field="source", reason=reason)
