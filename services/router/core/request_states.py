"""Owns the states of a request, and the whole truth about what may happen in each: two tables.

A request is WAITING while it has no instance, STARTING once a worker was asked to run it, STREAMING from its first
token on. Before the first token nothing was promised to the client, so losing the instance leads back to WAITING.

Afterwards it is SWITCHING until the next token comes from elsewhere: a failover when the instance was lost, a migration
when it handed the request over. The client sees a pause. In SWITCHING a request has a route on which a start was sent,
or none and is placed like one that waits; whatever is lost or refused there, it stays SWITCHING and tries on.
"""

from __future__ import annotations

from enum import StrEnum, auto


class RequestState(StrEnum):
    WAITING = auto()
    STARTING = auto()
    STREAMING = auto()
    SWITCHING = auto()
    FINISHED = auto()
    FAILED = auto()
    CANCELLED = auto()


class RequestEvent(StrEnum):
    """What can happen to a request, in the past tense of a log line."""

    ROUTE_CHOSEN = auto()
    START_REFUSED = auto()
    TOKENS_ARRIVED = auto()
    OUTPUT_ENDED = auto()
    INSTANCE_LOST = auto()
    HANDED_OVER = auto()
    ERROR_RAISED = auto()
    CLIENT_LEFT = auto()


_S, _E = RequestState, RequestEvent

TRANSITIONS: dict[RequestState, dict[RequestEvent, RequestState]] = {
    _S.WAITING: {
        _E.ROUTE_CHOSEN: _S.STARTING,
        _E.ERROR_RAISED: _S.FAILED,
        _E.CLIENT_LEFT: _S.CANCELLED,
    },
    _S.STARTING: {
        _E.START_REFUSED: _S.WAITING,
        _E.TOKENS_ARRIVED: _S.STREAMING,
        _E.OUTPUT_ENDED: _S.FINISHED,
        _E.INSTANCE_LOST: _S.WAITING,
        _E.HANDED_OVER: _S.SWITCHING,
        _E.ERROR_RAISED: _S.FAILED,
        _E.CLIENT_LEFT: _S.CANCELLED,
    },
    _S.STREAMING: {
        _E.TOKENS_ARRIVED: _S.STREAMING,
        _E.OUTPUT_ENDED: _S.FINISHED,
        _E.INSTANCE_LOST: _S.SWITCHING,
        _E.HANDED_OVER: _S.SWITCHING,
        _E.ERROR_RAISED: _S.FAILED,
        _E.CLIENT_LEFT: _S.CANCELLED,
    },
    _S.SWITCHING: {
        _E.ROUTE_CHOSEN: _S.SWITCHING,
        _E.START_REFUSED: _S.SWITCHING,
        _E.TOKENS_ARRIVED: _S.STREAMING,
        _E.OUTPUT_ENDED: _S.FINISHED,
        _E.INSTANCE_LOST: _S.SWITCHING,
        _E.HANDED_OVER: _S.SWITCHING,
        _E.ERROR_RAISED: _S.FAILED,
        _E.CLIENT_LEFT: _S.CANCELLED,
    },
    _S.FINISHED: {},
    _S.FAILED: {},
    _S.CANCELLED: {},
}  # fmt: skip

# What only a request with a route can see (True), or only one without (False).
NEEDS_ROUTE: dict[RequestEvent, bool] = {
    _E.ROUTE_CHOSEN: False,
    _E.START_REFUSED: True,
    _E.TOKENS_ARRIVED: True,
    _E.INSTANCE_LOST: True,
    _E.HANDED_OVER: True,
}


class IllegalTransition(Exception):
    """The shell let an event through that cannot happen in this state: a programmer error."""

    def __init__(self, state: RequestState, event: RequestEvent, *, has_route: bool) -> None:
        where = "with" if has_route else "without"
        super().__init__(f"{event} cannot happen to a request that is {state} {where} a route")
        self.state = state
        self.event = event
