"""Sources: what a model can be imported from, and what of it may be told."""

from __future__ import annotations

import pytest
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.sources import SOURCE_CHARACTERS_MAX, Source, SourceKind, parse_source, redacted


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("/models/a b", Source(kind=SourceKind.DIRECTORY, location="/models/a b")),
        ("file:///models/a%20b", Source(kind=SourceKind.DIRECTORY, location="/models/a b")),
        ("file://localhost/m", Source(kind=SourceKind.DIRECTORY, location="/m")),
        ("hf://gpt2", Source(kind=SourceKind.HUB, location="gpt2")),
        ("hf://org/name/", Source(kind=SourceKind.HUB, location="org/name")),
        ("hf://org/name@refs/pr/1", Source(kind=SourceKind.HUB, location="org/name", revision="refs/pr/1")),
        ("s3://bucket/a/b/", Source(kind=SourceKind.STORE, location="s3://bucket/a/b")),
        ("gs://bucket", Source(kind=SourceKind.STORE, location="gs://bucket")),
        ("az://container/a", Source(kind=SourceKind.STORE, location="az://container/a")),
        ("http://host:8080/a/", Source(kind=SourceKind.WEB, location="http://host:8080/a")),
        (
            "https://al%40ce:s3%2Fcret@host/a",
            Source(kind=SourceKind.WEB, location="https://host/a", user="al@ce", password="s3/cret"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_source_is_understood(text: str, source: Source) -> None:
    assert parse_source(text) == source
    assert "s3/cret" not in repr(source)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("/a\0b", "control characters"),
        ("/" + "a" * SOURCE_CHARACTERS_MAX, "too long"),
        ("models/m", "not understood"),
        ("ftp://alice:secret@host/m", "not understood"),
        ("http://host:port/secret@m", "not understood"),
        ("http://[::1/m", "not understood"),
        ("hf://a/b/c", "names no model of a hub"),
        ("hf://../etc", "names no model of a hub"),
        ("hf://a/b@", "is no revision"),
        ("hf://a/b@../x", "is no revision"),
        ("hf://a/b@v1?token=secret", "is no revision"),
        ("file://host/m", "absolute path"),
        ("s3://", "names no host or bucket"),
        ("s3://key:secret@bucket/m", "settings of the storage agents"),
        ("https://host/m?token=secret", "'?' or '#'"),
        ("https://host/m#secret", "'?' or '#'"),
        ("https://alice:secret@host/m/model.safetensors", "give its directory, https://host/m/"),
    ],
)
def test_what_is_no_source_is_refused_without_its_secrets(text: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_source(text)
    assert caught.value.field == "source"
    assert says in caught.value.reason
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/models/a?b", "/models/a?b"),
        ("hf://org/name@v1", "hf://org/name@v1"),
        ("hf://org/name?token=secret", "hf://org/name"),
        ("https://alice:secret@host:8080/a/?x=secret#secret", "https://host:8080/a/"),
        ("https://a@b:secret@host/a", "https://host/a"),
        ("http://alice:secret@host:port/a", "http://…"),
        ("s3://bucket/a", "s3://bucket/a"),
    ],
)
def test_a_source_is_told_without_its_secrets(text: str, told: str) -> None:
    assert redacted(text) == told
    assert redacted(told) == told
