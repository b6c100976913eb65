"""Owns what is left of a request that is over: its event, its log line, its part in the metrics (R2, R6)."""

from __future__ import annotations

import structlog
from whimbrel.chassis.bus import Bus
from whimbrel.wire.errors import Cancelled, WhimbrelError
from whimbrel.wire.events import RequestFailed, RequestFinished, RequestSwitched

from services.router import metrics
from services.router.core.requests import Switch
from services.router.outputs import Begun
from services.router.streams import Stream

log = structlog.get_logger()


async def settle(stream: Stream, bus: Bus, router_id: str, now: float) -> None:
    """Tell how the request ended. `now` is when it did, monotonic seconds."""
    request, specification = stream.request, stream.specification
    duration_s = now - request.created_at
    metrics.REQUESTS.labels(_outcome(stream), "cold" if request.is_cold else "warm").inc()
    if request.switch is not None:
        metrics.SWITCHES.labels(request.switch.kind, _outcome(stream)).inc()
    if stream.output.finish_reason is not None and stream.output.begun is not None:
        times = stream.output.begun.times
        metrics.FIRST_TOKEN.labels(times.tier).observe(times.first_token_s)
        metrics.TOKENS.labels("prompt").inc(len(specification.tokens))
        metrics.TOKENS.labels("output").inc(stream.output.output_tokens)
        if stream.progress.token_s:
            metrics.TOKEN.observe(stream.progress.token_s)
        event = _finished(stream, stream.output.begun, router_id, duration_s)
        await bus.publish_event(event)
        log.info(
            "request_finished",
            request_id=request.request_id,
            model_id=request.model_id,
            server_id=event.server_id,
            tier=event.tier,
            finish_reason=event.finish_reason,
            prompt_tokens=event.prompt_tokens,
            output_tokens=event.output_tokens,
            first_token_s=round(event.first_token_s, 4),
            duration_s=round(duration_s, 4),
            seed=specification.sampling.seed,
        )
        return
    error = _error_of(stream)
    await bus.publish_event(
        RequestFailed(
            request_id=request.request_id,
            model_id=request.model_id,
            router_id=router_id,
            code=error.code,
            message=str(error),
            output_tokens=stream.output.output_tokens,
            duration_s=duration_s,
        )
    )
    log.info(
        "request_failed",
        request_id=request.request_id,
        model_id=request.model_id,
        code=error.code,
        reason=str(error),
        output_tokens=stream.output.output_tokens,
        duration_s=round(duration_s, 4),
    )


def note_switched(stream: Stream, switch: Switch, server_id: str, router_id: str) -> RequestSwitched:
    """The first token after a switch is here. Before the first of all there is no pause that a client could see."""
    request, progress = stream.request, stream.progress
    pause_s = progress.pause_s if switch.output_tokens else 0.0
    metrics.SWITCHES.labels(switch.kind, "resumed").inc()
    if switch.output_tokens:
        metrics.PAUSE.labels(switch.kind).observe(pause_s)
    event = RequestSwitched(
        request_id=request.request_id,
        model_id=request.model_id,
        router_id=router_id,
        server_id=server_id,
        reason=f"{switch.kind}: {switch.reason}",
        output_tokens=switch.output_tokens,
        pause_s=pause_s,
    )
    log.info(
        "request_switched",
        request_id=request.request_id,
        model_id=request.model_id,
        server_id=event.server_id,
        reason=event.reason,
        output_tokens=event.output_tokens,
        pause_s=round(pause_s, 4),
    )
    return event


def _outcome(stream: Stream) -> str:
    if stream.output.finish_reason is not None:
        return "finished"
    return "cancelled" if stream.request.error is None else "failed"


def _error_of(stream: Stream) -> WhimbrelError:
    return stream.request.error or Cancelled(what="the request (its client left)")


def _finished(stream: Stream, begun: Begun, router_id: str, duration_s: float) -> RequestFinished:
    times = begun.times
    return RequestFinished(
        request_id=stream.request.request_id,
        model_id=stream.request.model_id,
        router_id=router_id,
        server_id=begun.server_id,
        tier=str(times.tier),
        finish_reason=str(stream.output.finish_reason),
        prompt_tokens=len(stream.specification.tokens),
        output_tokens=stream.output.output_tokens,
        queue_s=times.queue_s,
        fetch_s=times.fetch_s,
        load_s=times.load_s,
        bind_s=times.bind_s,
        prefill_s=times.prefill_s,
        first_token_s=times.first_token_s,
        duration_s=duration_s,
    )
