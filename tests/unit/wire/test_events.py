"""Public events: CloudEvents that any client of any language can read."""

from __future__ import annotations

import json

import pytest
from whimbrel.wire import events
from whimbrel.wire.errors import ProtocolError
from whimbrel.wire.events import EVENTS, PublicEvent

VALUES = {"str": "x", "int": 3, "float": 1.5, "bool": True}


def build(cls: type[PublicEvent]) -> PublicEvent:
    annotations = {
        name: kind for base in reversed(cls.__mro__) for name, kind in vars(base).get("__annotations__", {}).items()
    }
    return cls(**{name: VALUES[annotations[name]] for name in cls.__struct_fields__})


@pytest.mark.parametrize("cls", EVENTS.values(), ids=EVENTS)
def test_every_event_is_a_cloud_event_and_comes_back_equal(cls: type[PublicEvent]) -> None:
    event = build(cls)
    data = events.encode_event(event, event_id="e1", source="/whimbrel/wb/test", time_s=1_800_000_000.25)
    plain = json.loads(data)
    assert {"specversion", "id", "source", "type"} <= plain.keys()
    assert plain["specversion"] == "1.0"
    assert plain["type"] == f"{cls.noun}.{cls.verb}"
    assert plain["time"].startswith("2027-01-15T")
    envelope, again = events.decode_event(data)
    assert again == event
    assert envelope.id == "e1"


def test_an_event_may_grow_a_field_without_breaking_a_reader() -> None:
    event = events.ModelDeleted(model_id="m")
    plain = json.loads(events.encode_event(event, event_id="e", source="/s", time_s=0))
    plain["data"]["new_field"] = 1
    assert events.decode_event(json.dumps(plain).encode())[1] == event


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"specversion":"1.0"}', b"\xff"])
def test_what_is_no_event_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        events.decode_event(data)


def test_an_unknown_event_type_is_named() -> None:
    plain = json.loads(events.encode_event(events.ModelDeleted(model_id="m"), event_id="e", source="/s", time_s=0))
    plain["type"] = "model.painted"
    with pytest.raises(ProtocolError, match=r"model\.painted"):
        events.decode_event(json.dumps(plain).encode())
