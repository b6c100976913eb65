"""Owns the body of POST /admin/models: what to deploy, from where."""

from __future__ import annotations

from whimbrel.wire.ids import check_model_id
from whimbrel.wire.messages import DeployModel
from whimbrel.wire.sources import parse_source

from services.router.core.fields import read_object, read_text, refuse
from services.router.core.scalings import read_keep_alive_s, read_scaling


def read_deployment(body: object) -> DeployModel:
    """The command to the scheduler; raises InvalidRequest."""
    given = read_object(body, "body")
    for name in given:
        if name not in ("model", "source", "keep_alive_s", "scaling"):
            refuse(name[:64], "a deployment has model, source, keep_alive_s and scaling only")
    source = read_text(given.get("source"), "source")
    parse_source(source)
    keep_alive_s, scaling = given.get("keep_alive_s"), given.get("scaling")
    return DeployModel(
        model_id=check_model_id(read_text(given.get("model"), "model")),
        source=source,
        keep_alive_s=None if keep_alive_s is None else read_keep_alive_s(keep_alive_s, "keep_alive_s"),
        scaling=None if scaling is None else read_scaling(scaling, "scaling"),
    )
