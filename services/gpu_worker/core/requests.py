"""Owns the requests of this worker: one runs, a bounded number waits its turn, finished ones are kept for resending."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from whimbrel.wire.errors import InferenceLost, QueueFull, StaleEpoch
from whimbrel.wire.messages import FinishReason, Moved, StartInference, TokenEntry

from services.gpu_worker.core.sequence import Sequence

# A router that missed the last frame asks again after a second; it gives up long before this.
FINISHED_KEEP_S = 30.0
# A bound on memory when thousands of short requests end within that time; 4,096 of 1,000 tokens are some 32 MB.
# With log probabilities a token takes up to 164 bytes more, and no worker decodes more than some 100,000 in that time.
FINISHED_MAX = 4096


class Requests:
    """`active_max` bounds the running and waiting requests together; `queue` names them in errors."""

    def __init__(self, *, active_max: int, queue: str) -> None:
        self._active_max = active_max
        self._queue = queue
        self._by_id: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: Sequence | None = None
        self._steps = 0
        # In order of their ends.
        self._finished: deque[Sequence] = deque()

    @property
    def active(self) -> int:
        """Running and waiting requests."""
        return len(self._waiting) + (self._running is not None)

    @property
    def running(self) -> list[Sequence]:
        """Those that have their turn, and more tokens to come."""
        return [] if self._running is None or self._running.is_finished else [self._running]

    def knows(self, request_id: str, epoch: int) -> bool:
        """Whether this start of a request runs, waits, or has ended here lately."""
        sequence = self._by_id.get(request_id)
        return sequence is not None and sequence.epoch == epoch

    def is_active(self, request_id: str) -> bool:
        """Whether some start of a request runs or waits."""
        sequence = self._by_id.get(request_id)
        return sequence is not None and not sequence.is_finished

    def note_step(self) -> None:
        """The engine has made a step, for whomever."""
        self._steps += 1

    def start(self, request: StartInference, now: float) -> Sequence | None:
        """Let a request wait its turn; None when it is known already, for starting twice is starting once.

        A higher epoch replaces the earlier start of the request. Raises StaleEpoch for a lower one, QueueFull.
        """
        known = self._by_id.get(request.request_id)
        if known is not None and request.epoch < known.epoch:
            raise StaleEpoch(epoch=request.epoch, current_epoch=known.epoch)
        if self.knows(request.request_id, request.epoch):
            return None
        if known is not None:
            self._drop(known, now)
        if self.active >= self._active_max:
            raise QueueFull(queue=self._queue, limit=self._active_max)
        sequence = Sequence(request, now)
        sequence.steps_told = self._steps
        self._by_id[sequence.request_id] = sequence
        if sequence.is_finished:
            self._keep(sequence)
        else:
            self._waiting.append(sequence)
        return sequence

    def next(self, now: float) -> Sequence | None:
        """The request whose turn it is. The caller hands it back with `end_turn`."""
        assert self._running is None, "one request runs at a time"
        if not self._waiting:
            return None
        self._running = self._waiting.popleft()
        self._running.start(now)
        return self._running

    def end_turn(self) -> None:
        """The running request has finished."""
        assert self._running is not None
        assert self._running.is_finished
        sequence, self._running = self._running, None
        # It may have been started again, under a new epoch, while its last step ran.
        if self._by_id.get(sequence.request_id) is sequence:
            self._keep(sequence)

    def abort(self, request_id: str, epoch: int, now: float) -> Sequence | None:
        """End a request; a running one ends with the step it is in. None when there is nothing to end."""
        sequence = self._by_id.get(request_id)
        if sequence is None or sequence.is_finished or epoch < sequence.epoch:
            return None
        self._end(sequence, now)
        return sequence

    def abort_router(self, router_id: str, now: float, *, epoch: int | None = None) -> list[Sequence]:
        """End what a router started: everything when it is lost, all but its new life's when `epoch` is given."""
        ended = [
            sequence
            for sequence in self._active()
            if sequence.request.router_id == router_id and sequence.request.router_epoch != epoch
        ]
        for sequence in ended:
            self._end(sequence, now)
        return ended

    def preempt(self, now: float) -> list[Sequence]:
        """End everything for another model's sake. The running one still ends its turn."""
        ended = list(self._active())
        for sequence in ended:
            self._end(sequence, now, FinishReason.PREEMPTED)
        return ended

    def move(self, moved: Callable[[Sequence], Moved], now: float) -> list[Sequence]:
        """End everything because it goes on elsewhere: where, `moved` says. The running one still ends its turn."""
        ended = list(self._active())
        for sequence in ended:
            self._end(sequence, now, FinishReason.MOVED, moved(sequence))
        return ended

    def resend(self, request_id: str, epoch: int, position: int) -> tuple[list[TokenEntry], str]:
        """What a request has from `position` on; and the router it is for.

        When that is nothing yet, an empty entry says that the engine is at work, on this request or on one before it:
        that it has made a step since this was asked last. There is no entry when it has not. Raises InferenceLost for a
        request that is not known here, StaleEpoch, InvalidRequest.
        """
        sequence = self._by_id.get(request_id)
        if sequence is None or epoch > sequence.epoch:
            raise InferenceLost(reason="its worker does not know it (any more)", output_tokens=position)
        if epoch < sequence.epoch:
            raise StaleEpoch(epoch=epoch, current_epoch=sequence.epoch)
        entries = sequence.entries(position)
        is_news = bool(entries[0].tokens) or sequence.is_finished or self._steps != sequence.steps_told
        sequence.steps_told = self._steps
        return entries if is_news else [], sequence.request.router_id

    def expire(self, now: float) -> None:
        """Forget finished requests that nobody will ask for any more."""
        while self._finished and (
            len(self._finished) > FINISHED_MAX or now - _finished_at(self._finished[0]) >= FINISHED_KEEP_S
        ):
            self._forget_oldest()

    def _active(self) -> Iterator[Sequence]:
        if self._running is not None and not self._running.is_finished:
            yield self._running
        yield from list(self._waiting)

    def _end(
        self,
        sequence: Sequence,
        now: float,
        reason: FinishReason = FinishReason.ABORTED,
        moved: Moved | None = None,
    ) -> None:
        sequence.finish(reason, now, moved=moved)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._keep(sequence)

    def _drop(self, sequence: Sequence, now: float) -> None:
        """An earlier start of a request that was started again: it must not say anything more."""
        sequence.finish(FinishReason.ABORTED, now)
        del self._by_id[sequence.request_id]
        for kept in (self._waiting, self._finished):
            if sequence in kept:
                kept.remove(sequence)

    def _keep(self, sequence: Sequence) -> None:
        self._finished.append(sequence)
        if len(self._finished) > FINISHED_MAX:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        del self._by_id[self._finished.popleft().request_id]


def _finished_at(sequence: Sequence) -> float:
    assert sequence.finished_at is not None
    return sequence.finished_at
