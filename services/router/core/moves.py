"""Owns the body of POST /admin/migrations."""

from __future__ import annotations

from whimbrel.wire.messages import MigrateModel

from services.router.core.fields import read_object, read_optional, read_text, read_whole, refuse

SLOT_MAX = 4096
_FIELDS = ("what", "server", "slot")


def read_move(body: object) -> MigrateModel:
    """What is to move, and where to. Raises InvalidRequest."""
    given = read_object(body, "body")
    for name in given:
        if name not in _FIELDS:
            refuse(name[:64], f"is not known here; a move has {', '.join(_FIELDS)}")
    for name in ("what", "server"):
        if name not in given:
            refuse(name, "is missing; name a model, an instance or a request, and the server to move it to")
    return MigrateModel(
        what=read_text(given["what"], "what"),
        server_id=read_text(given["server"], "server"),
        slot=read_optional(given, "slot", lambda value, field: read_whole(value, field, 0, SLOT_MAX)),
    )
