"""Owns the requests of a simulated worker: the real cores of the service (requests, sequence, routers), driven as its
`inference.py` drives them: one after the other, a token at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from whimbrel.chassis.heartbeat import HEARTBEAT_S, HEARTBEATS_MISSED_MAX
from whimbrel.wire.errors import WhimbrelError
from whimbrel.wire.messages import AbortInference, ResendTokens, StartInference, TokenEntry, TokenFrame

from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.routers import Routers
from services.gpu_worker.core.sequence import Sequence

if TYPE_CHECKING:
    from tests.simulation.workers import SimWorker

PREFILL_S = 0.02
REQUESTS_MAX = 64


def token_of(request_id: str, position: int) -> int:
    """What the engine says at this position: a function of the request, whoever computes it."""
    return (hash_of(request_id) + 7919 * position) % 50_000


def hash_of(text: str) -> int:
    return sum((k + 1) * ord(letter) for k, letter in enumerate(text)) * 2654435761 % 2**31


class Inferences:
    """`token_s` says how long a token of a request takes."""

    def __init__(self, worker: SimWorker, token_s: Callable[[str], float]) -> None:
        self._worker = worker
        self._token_s = token_s
        self.requests = Requests(active_max=REQUESTS_MAX, queue=f"worker {worker.server_id}/{worker.slot}")
        self._routers = Routers(lost_after_s=HEARTBEATS_MISSED_MAX * HEARTBEAT_S)
        self._running: Sequence | None = None

    @property
    def active(self) -> int:
        return self.requests.active

    def start(self, message: StartInference) -> None:
        """Raises InstanceGone when the instance does not serve, StaleEpoch, QueueFull."""
        if self.requests.knows(message.request_id, message.epoch):
            return
        self.hear_router(message.router_id, message.router_epoch)
        self._worker.check_serving(message.instance_id)
        self.requests.start(message, self._worker.now)
        self._worker.beat()
        self._next()

    def abort(self, message: AbortInference) -> None:
        ended = self.requests.abort(message.request_id, message.epoch, self._worker.now)
        self._after_abort([] if ended is None else [ended])

    def resend(self, message: ResendTokens) -> None:
        """Raises InferenceLost, StaleEpoch, InvalidRequest."""
        entry, router_id = self.requests.resend(message.request_id, message.epoch, message.position)
        if entry is not None:
            self._say(router_id, entry)

    def _next(self) -> None:
        if self._running is None:
            self._running = self.requests.next(self._worker.now)
            if self._running is not None:
                self._worker.perform(PREFILL_S, self._decode)

    def _decode(self) -> None:
        sequence = self._running
        assert sequence is not None
        token = token_of(sequence.request_id, sequence.position)
        entry = sequence.advance(token, self._worker.now)
        if entry is not None and entry.finish_reason is None:
            self._say(sequence.request.router_id, entry)
            self._worker.perform(self._token_s(sequence.request_id), self._decode)
            return
        self._running = None
        self.requests.end_turn()
        self._note_change()
        if entry is not None:
            self._say(sequence.request.router_id, entry)
        self._next()

    def hear_router(self, router_id: str, epoch: int) -> None:
        try:
            is_new_life = self._routers.hear(router_id, epoch, self._worker.now)
        except WhimbrelError:
            return
        if is_new_life:
            self._after_abort(self.requests.abort_router(router_id, self._worker.now, epoch=epoch))

    def watch(self) -> None:
        for router_id in self._routers.take_lost(self._worker.now):
            self._after_abort(self.requests.abort_router(router_id, self._worker.now))
        self.requests.expire(self._worker.now)

    def _after_abort(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            self._say(sequence.request.router_id, sequence.entry(sequence.position))
        self._note_change()

    def _note_change(self) -> None:
        self._worker.beat()
        if self.active == 0:
            self._worker.end_of_requests()

    def _say(self, router_id: str, entry: TokenEntry) -> None:
        worker = self._worker
        frame = TokenFrame(server_id=worker.server_id, slot=worker.slot, entries=(entry,))
        worker.network.send(worker, ("router", router_id), frame)
