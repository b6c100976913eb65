"""Owns how errors look over HTTP: the one table from codes to statuses, and OpenAI's error object."""

from __future__ import annotations

from dataclasses import dataclass

from whimbrel.wire import errors
from whimbrel.wire.errors import WhimbrelError

# Every code of wire.errors has its status here and nowhere else; a test compares the two.
STATUSES: dict[str, int] = {
    errors.InvalidRequest.code: 400,
    errors.UnsupportedParameter.code: 400,
    errors.ContextLengthExceeded.code: 400,
    errors.ModelNotFound.code: 404,
    errors.JobNotFound.code: 404,
    errors.ServerNotFound.code: 404,
    errors.Conflict.code: 409,
    errors.Cancelled.code: 409,
    errors.PayloadTooLarge.code: 413,
    errors.ModelTooLarge.code: 422,
    errors.ImportFailed.code: 422,
    errors.QueueFull.code: 429,
    errors.InternalError.code: 500,
    errors.ProtocolError.code: 500,
    errors.LoadFailed.code: 500,
    errors.Unavailable.code: 503,
    errors.InferenceLost.code: 503,
    errors.InstanceGone.code: 503,
    errors.StaleEpoch.code: 503,
    errors.ColdStartTimeout.code: 504,
    errors.RequestTimeout.code: 504,
}

# What a client may try again is told when: soon, because routes and schedulers come back within seconds.
RETRY_AFTER_S = 1

_RETRIED_STATUSES = (429, 503)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorObject:
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str

    def body(self) -> dict[str, dict[str, str | None]]:
        """The response body."""
        return {
            "error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code},
        }


def status_of(error: WhimbrelError) -> int:
    return STATUSES[error.code]


def retry_after_s(error: WhimbrelError) -> int | None:
    """Seconds after which trying again is worth it; None where it is not."""
    if status_of(error) not in _RETRIED_STATUSES:
        return None
    given = error.fields().get("retry_after_s")
    return given if isinstance(given, int) else RETRY_AFTER_S


def error_object(error: WhimbrelError) -> ErrorObject:
    """The object of a typed error: its sentence, its code, and the parameter it is about where there is one."""
    return ErrorObject(message=str(error), type=error_type(status_of(error)), param=_parameter(error), code=error.code)


def error_type(status: int) -> str:
    """OpenAI's kind of error for a status."""
    if status == 429:
        return "rate_limit_error"
    if status == 404:
        return "not_found_error"
    return "invalid_request_error" if status < 500 else "server_error"


def _parameter(error: WhimbrelError) -> str | None:
    match error:
        case errors.InvalidRequest(field=field) | errors.UnsupportedParameter(field=field):
            return field
        case errors.ModelNotFound() | errors.ModelTooLarge():
            return "model"
    return None
