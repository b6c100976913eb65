"""Owns what becomes of errors in loads: who hears what, and that an error does not keep memory."""

from __future__ import annotations

import traceback

import ckptio
import structlog
from whimbrel.wire.errors import InternalError, LoadFailed, Unavailable, WhimbrelError

log = structlog.get_logger()


def explain(error: Exception, *, model_id: str, server_id: str) -> WhimbrelError:
    """What ended a load, as those who wait should hear it: a checkpoint that can't be loaded anywhere is a LoadFailed,
    what is this server's trouble is Unavailable, and anything unknown is logged and an InternalError."""
    if isinstance(error, ExceptionGroup):
        return explain(error.exceptions[0], model_id=model_id, server_id=server_id)
    if isinstance(error, WhimbrelError):
        return error
    if isinstance(error, ckptio.DeviceError):
        return Unavailable(what=f"a GPU of server {server_id} ({error})")
    if isinstance(error, ckptio.CkptioError):
        return LoadFailed(model_id=model_id, reason=str(error))
    if isinstance(error, OSError):
        return Unavailable(what=f"storage of server {server_id} ({error})")
    # A load that fails in an unknown way must not take the server with it.
    log.error("load_crashed", model_id=model_id, exc_info=error)
    return InternalError(service=f"storage agent {server_id}")


def forget_frames(error: BaseException) -> None:
    """Let go of what the frames of an error hold, such as views of the pool's memory: the error may live for long."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
