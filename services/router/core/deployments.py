"""Owns the body of POST /admin/models: what to deploy, from where."""

from __future__ import annotations

from whimbrel.wire.ids import check_model_id
from whimbrel.wire.messages import DeployModel
from whimbrel.wire.sources import parse_source

from services.router.core.fields import read_number, read_object, read_text, refuse

# A year; whoever wants a model to stay for longer can say so again.
KEEP_ALIVE_S_MAX = 365 * 24 * 3600.0


def read_deployment(body: object) -> DeployModel:
    """The command to the scheduler; raises InvalidRequest."""
    given = read_object(body, "body")
    for name in given:
        if name not in ("model", "source", "keep_alive_s"):
            refuse(name[:64], "a deployment has model, source and keep_alive_s only")
    source = read_text(given.get("source"), "source")
    parse_source(source)
    keep_alive_s = given.get("keep_alive_s")
    return DeployModel(
        model_id=check_model_id(read_text(given.get("model"), "model")),
        source=source,
        keep_alive_s=None if keep_alive_s is None else read_number(keep_alive_s, "keep_alive_s", 0.0, KEEP_ALIVE_S_MAX),
    )
