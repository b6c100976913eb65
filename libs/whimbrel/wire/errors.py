"""Owns every operating error: its stable code, its fields, and the sentence made from them.

An error is raised as its class, crosses the bus as an `ErrorReply` and is raised again as the same class on the other
side. The router alone maps codes to HTTP statuses. Broken messages are `ProtocolError`s: dropped, counted, logged.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import msgspec

FieldValue = str | int | float | None


@dataclass(eq=False, kw_only=True)
class WhimbrelError(Exception):
    """Something went wrong in a way that good systems see."""

    code: ClassVar[str] = "internal_error"
    text: ClassVar[str] = "something went wrong inside; the log of the service says what"

    def __post_init__(self) -> None:
        super().__init__(str(self))

    def __str__(self) -> str:
        return self.text.format(**self.fields())

    def fields(self) -> dict[str, FieldValue]:
        """The error's own fields, as they travel."""
        return asdict(self)


@dataclass(eq=False, kw_only=True)
class InvalidRequest(WhimbrelError):
    code = "invalid_request"
    text = "{field}: {reason}"
    field: str
    reason: str


@dataclass(eq=False, kw_only=True)
class UnsupportedParameter(WhimbrelError):
    code = "unsupported_parameter"
    text = "parameter {field!r} is not supported{reason}; leave it out"
    field: str
    reason: str = ""


@dataclass(eq=False, kw_only=True)
class ContextLengthExceeded(WhimbrelError):
    code = "context_length_exceeded"
    text = (
        "the model's context is {context_tokens} tokens; the prompt has {prompt_tokens} and {output_tokens} more were "
        "asked for; shorten one of them"
    )
    context_tokens: int
    prompt_tokens: int
    output_tokens: int


@dataclass(eq=False, kw_only=True)
class ModelNotFound(WhimbrelError):
    code = "model_not_found"
    text = "model {model_id!r} is not deployed; GET /v1/models lists those that are"
    model_id: str


@dataclass(eq=False, kw_only=True)
class JobNotFound(WhimbrelError):
    code = "job_not_found"
    text = "there is no job {job_id!r}; jobs are forgotten some time after they end"
    job_id: str


@dataclass(eq=False, kw_only=True)
class ServerNotFound(WhimbrelError):
    code = "server_not_found"
    text = "there is no server {server_id!r} in this cluster; there are: {known}"
    server_id: str
    known: str


@dataclass(eq=False, kw_only=True)
class Conflict(WhimbrelError):
    code = "conflict"
    text = "{reason}"
    reason: str


@dataclass(eq=False, kw_only=True)
class PayloadTooLarge(WhimbrelError):
    code = "payload_too_large"
    text = "a message of {size_bytes} bytes is over the limit of {limit_bytes}; send a shorter prompt"
    size_bytes: int
    limit_bytes: int


@dataclass(eq=False, kw_only=True)
class ModelTooLarge(WhimbrelError):
    code = "model_too_large"
    text = (
        "model {model_id!r} needs {need_bytes} bytes and the largest server has room for {capacity_bytes}; add a "
        "bigger server, or raise its budgets (WB_POOL_BYTES for memory, WB_SSD_BYTES for its disk)"
    )
    model_id: str
    need_bytes: int
    capacity_bytes: int


@dataclass(eq=False, kw_only=True)
class QueueFull(WhimbrelError):
    code = "queue_full"
    text = "{queue} already holds {limit} requests; try again in {retry_after_s} s"
    queue: str
    limit: int
    retry_after_s: int = 1


@dataclass(eq=False, kw_only=True)
class Unavailable(WhimbrelError):
    code = "unavailable"
    text = "{what} is not available right now; try again in {retry_after_s} s"
    what: str
    retry_after_s: int = 1


@dataclass(eq=False, kw_only=True)
class ColdStartTimeout(WhimbrelError):
    code = "cold_start_timeout"
    text = "model {model_id!r} was not ready after {waited_s:.1f} s (stage: {stage}); try again, or raise the limit"
    model_id: str
    waited_s: float
    stage: str


@dataclass(eq=False, kw_only=True)
class RequestTimeout(WhimbrelError):
    code = "request_timeout"
    text = "no token came for {waited_s:.1f} s; the request was ended"
    waited_s: float


@dataclass(eq=False, kw_only=True)
class InferenceLost(WhimbrelError):
    code = "inference_lost"
    text = "the instance that ran this request went away ({reason}) after {output_tokens} tokens; send it again"
    reason: str
    output_tokens: int


@dataclass(eq=False, kw_only=True)
class InstanceGone(WhimbrelError):
    code = "instance_gone"
    text = "instance {instance_id!r} is not on this worker; place the model again"
    instance_id: str


@dataclass(eq=False, kw_only=True)
class LoadFailed(WhimbrelError):
    code = "load_failed"
    text = "model {model_id!r} could not be loaded: {reason}"
    model_id: str
    reason: str


@dataclass(eq=False, kw_only=True)
class ImportFailed(WhimbrelError):
    code = "import_failed"
    text = "model {model_id!r} could not be imported (stage: {stage}): {reason}"
    model_id: str
    stage: str
    reason: str


@dataclass(eq=False, kw_only=True)
class Cancelled(WhimbrelError):
    code = "cancelled"
    text = "{what} was cancelled"
    what: str


@dataclass(eq=False, kw_only=True)
class StaleEpoch(WhimbrelError):
    code = "stale_epoch"
    text = "epoch {epoch} is over; the current one is {current_epoch}"
    epoch: int
    current_epoch: int


@dataclass(eq=False, kw_only=True)
class InternalError(WhimbrelError):
    """What a peer that failed unexpectedly answers; its log has the cause."""

    text = "{service} failed while answering; its log says why"
    service: str


@dataclass(eq=False, kw_only=True)
class ProtocolError(WhimbrelError):
    """A peer or we broke the contract: an unknown tag, a missing field, a wrong type, another schema version."""

    code = "protocol_error"
    text = "a message of {size_bytes} bytes could not be understood: {reason}"
    size_bytes: int
    reason: str


ERRORS: dict[str, type[WhimbrelError]] = {
    error.code: error
    for error in (
        InvalidRequest, UnsupportedParameter, ContextLengthExceeded, ModelNotFound, JobNotFound, ServerNotFound,
        Conflict, PayloadTooLarge, ModelTooLarge, QueueFull, Unavailable, ColdStartTimeout, RequestTimeout,
        InferenceLost, InstanceGone, LoadFailed, ImportFailed, Cancelled, StaleEpoch, InternalError, ProtocolError,
    )
}  # fmt: skip


def from_fields(code: str, fields: dict[str, Any]) -> WhimbrelError:
    """The error that a reply's code and fields describe; raises ProtocolError when they describe none."""
    error = ERRORS.get(code)
    if error is None:
        raise ProtocolError(size_bytes=0, reason=f"error code {code!r} is unknown")
    try:
        return error(**msgspec.convert(fields, dict[str, FieldValue]))
    except (TypeError, msgspec.ValidationError) as cause:
        raise ProtocolError(size_bytes=0, reason=f"error {code!r} with wrong fields: {cause}") from cause
