"""Owns identifiers: how a model may be called, how ids are made, and the epochs that order lives of a service."""

from __future__ import annotations

import re
import uuid

from whimbrel.wire.errors import InvalidRequest

# Long enough for "organisation/model-variant" names of public hubs; short enough for a file name and a subject token.
MODEL_ID_LENGTH_MAX = 128
SERVER_ID_LENGTH_MAX = 64

_SEGMENT = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?"
_MODEL_ID = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})?")
_SERVICE_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?")


def check_model_id(model_id: str) -> str:
    """Return `model_id` when it is safe as a path, a URL and a subject; raise InvalidRequest otherwise."""
    well_formed = _MODEL_ID.fullmatch(model_id) is not None and ".." not in model_id and "--" not in model_id
    if not well_formed or len(model_id) > MODEL_ID_LENGTH_MAX:
        raise InvalidRequest(
            field="model",
            reason=f"{model_id[:MODEL_ID_LENGTH_MAX]!r} is no model id: use letters, digits, '.', '_' and single '-', "
            f"at most one '/', no '..', at most {MODEL_ID_LENGTH_MAX} characters",
        )
    return model_id


def check_service_id(service_id: str) -> str:
    """Return `service_id` (of a server or router) when it is one subject token; raise InvalidRequest otherwise."""
    if _SERVICE_ID.fullmatch(service_id) is None or len(service_id) > SERVER_ID_LENGTH_MAX:
        raise InvalidRequest(
            field="id", reason=f"{service_id[:SERVER_ID_LENGTH_MAX]!r} is no id: use letters, digits, '_' and '-'"
        )
    return service_id


def directory_name(model_id: str) -> str:
    """One directory name for a model id. Unique because '--' cannot stand in an id."""
    return check_model_id(model_id).replace("/", "--")


def model_id_of_directory(name: str) -> str:
    """The model id whose directory is called `name`; raises InvalidRequest when no id is."""
    return check_model_id(name.replace("--", "/"))


def new_id(prefix: str) -> str:
    """A fresh, time-sortable-enough random id such as `req-1f0c…`, unique without coordination."""
    return f"{prefix}-{uuid.uuid4().hex}"
