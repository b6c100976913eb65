"""A worker of real cores, without threads and without waiting, that has an accident when one is planned.

The cores are those of its service (requests, sequences, rounds, resumptions, sampling, log probabilities) around the
echo's logits, driven as its shell drives them, on a bus in memory with the real messages.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from whimbrel.chassis.bus import Received
from whimbrel.chassis.delivery import Handler
from whimbrel.chassis.memory_bus import InMemoryBus
from whimbrel.wire.errors import InstanceGone
from whimbrel.wire.messages import (
    AbortInference,
    Ack,
    HandOver,
    InferenceResumed,
    MigrateInstance,
    ResendTokens,
    ResumeInference,
    Route,
    StartInference,
    TokenEntry,
    TokenFrame,
    WorkerHeartbeat,
    WorkerState,
)

from services.gpu_worker.core.logprobs import token_logprobs
from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.resumptions import Resumptions
from services.gpu_worker.core.rounds import Output, Rounds
from services.gpu_worker.core.sampling import choose_token
from services.gpu_worker.core.sequence import Sequence, check_request
from services.gpu_worker.engines.echo_engine import made_up_logits
from services.gpu_worker.engines.engine import Decoded

CONTEXT_TOKENS = 512
REPEATED_TOKENS = 3


class Accident(Enum):
    MOVE = auto()
    KILL = auto()


@dataclass
class Plan:
    """What happens to the worker that takes step `at`, counted over both; the rounds of a move begin `lead` steps
    before it. The frames of the steps `lost` never arrive, unless they are the last; after those of `repeated` comes
    another that says some tokens before them once more."""

    accident: Accident | None = None
    at: int = 0
    lead: int = 0
    lost: frozenset[int] = frozenset()
    repeated: frozenset[int] = frozenset()
    steps: int = 0
    is_done: bool = False
    resends: int = 0


def decode(sequence: Sequence, vocabulary_size: int) -> Decoded:
    """The echo, sampled: as the request says, from logits in which the prompt is the most probable."""
    position, request = sequence.position, sequence.request
    if position >= sequence.prompt_tokens:
        return Decoded(None)
    logits = made_up_logits(sequence.tokens[position], position, vocabulary_size)
    prompt = sequence.tokens[: sequence.prompt_tokens]
    token = choose_token(logits, request.sampling, prompt=prompt, output=sequence.output, position=position)
    if sequence.is_stop(token):
        return Decoded(None)
    top = request.top_logprobs
    return Decoded(token) if top is None else Decoded(token, token_logprobs(logits, token, top))


class CoreWorker:
    """One slot with one instance; `other` is where its requests move. `tell` gets its heartbeats to the router at once:
    one of a life that has ended with its request must not reach the next."""

    def __init__(self, bus: InMemoryBus, route: Route, vocabulary_size: int, tell: Handler) -> None:
        self.route = route
        self.epoch = 1
        self.other = self
        self.bus = bus
        self._tell = tell
        self._vocabulary_size = vocabulary_size
        self._arrived = asyncio.Event()
        self.begin(Plan())

    def begin(self, plan: Plan, *, has_instance: bool = True) -> None:
        """As new."""
        self.plan = plan
        self._has_instance = has_instance
        self.requests = Requests(active_max=64, queue="worker")
        self.rounds = Rounds(self.requests, server_id=self.route.server_id, slot=self.route.slot)
        self.resumptions = Resumptions()
        self._turn: Sequence | None = None

    async def start(self) -> None:
        await self.bus.subscribe(
            self.bus.subjects.all_to_worker(self.route.server_id, self.route.slot), self._on_message
        )

    async def beat(self) -> None:
        beat = WorkerHeartbeat(
            server_id=self.route.server_id,
            slot=self.route.slot,
            epoch=self.epoch,
            device="cpu",
            state=WorkerState.READY if self._has_instance else WorkerState.EMPTY,
            instance_id=self.route.instance_id if self._has_instance else None,
            model_id=None,
            active_requests=self.requests.active,
        )
        await self._tell(Received(subject="", message=beat, reply_to=None))

    async def run(self) -> None:
        while True:
            if self._turn is None:
                self._turn = self.requests.next(0.0)
            if self._turn is None:
                self._arrived.clear()
                await self._arrived.wait()
            elif self._turn.is_finished:
                self._end_turn()
            else:
                await self._step(self._turn)
                await asyncio.sleep(0)

    async def _on_message(self, received: Received) -> None:
        match received.message:
            case StartInference() as message:
                await self._start(message)
            case ResendTokens(request_id=request_id, epoch=epoch, position=position):
                self.plan.resends += 1
                entries, router_id = self.requests.resend(request_id, epoch, position)
                for entry in entries:
                    await self._say(router_id, entry)
            case AbortInference(request_id=request_id, epoch=epoch):
                self.requests.abort(request_id, epoch, 0.0)
        await self.bus.reply(received.reply_to, Ack())

    async def _start(self, message: StartInference) -> None:
        if not self._has_instance:
            raise InstanceGone(instance_id=message.instance_id)
        request = self.resumptions.complete(message)
        check_request(request, context_tokens=CONTEXT_TOKENS, vocabulary_size=self._vocabulary_size)
        sequence = self.requests.start(request, 0.0)
        assert sequence is not None
        sequence.computed = self.resumptions.take(request, sequence.tokens)
        if sequence.is_finished:
            await self._say(request.router_id, sequence.entry(sequence.position))
        self._arrived.set()

    async def _step(self, sequence: Sequence) -> None:
        plan, step = self.plan, self.plan.steps
        plan.steps += 1
        if plan.accident is Accident.MOVE and plan.at - plan.lead <= step <= plan.at:
            self._begin_to_move()
        decoded = decode(sequence, self._vocabulary_size)
        if plan.accident is Accident.KILL and step == plan.at:
            await self._die()
            return
        entry = sequence.advance(decoded.token, 0.0, decoded.logprobs)
        assert entry is not None
        if plan.accident is Accident.MOVE and step == plan.at and not sequence.is_finished:
            await self._hand_over(entry)
        elif step not in plan.lost or entry.finish_reason is not None:
            await self._say(sequence.request.router_id, entry)
        if step in plan.repeated:
            await self._say(sequence.request.router_id, sequence.entry(max(0, entry.position - REPEATED_TOKENS)))

    def _end_turn(self) -> None:
        self._turn = None
        self.requests.end_turn()
        self.rounds.on_requests_ended(0.0)

    async def _die(self) -> None:
        """With all that it had; the heartbeat of its next life tells."""
        self.plan.is_done = True
        self.begin(self.plan, has_instance=False)
        self.epoch += 1
        await self.beat()

    def _begin_to_move(self) -> None:
        if self.rounds.migration_id is None:
            self._carry(
                self.rounds.migrate(
                    MigrateInstance(
                        migration_id=f"migration-{self.plan.steps}",
                        instance_id=self.route.instance_id,
                        destination=self.other.route,
                        scheduler_epoch=1,
                    ),
                    0.0,
                    is_here=True,
                )
            )

    def _carry(self, outputs: list[Output]) -> None:
        """What the source has for the destination gets there, and the answers back."""
        for output in outputs:
            if isinstance(output, ResumeInference):
                answer = self.other.hear(output)
                self._carry([] if answer is None else self.rounds.on_resumed(answer, 0.0))

    def hear(self, message: ResumeInference) -> InferenceResumed | None:
        """As the destination of a move: the tokens are computed at once."""
        answer = self.resumptions.hear(message, 0.0)
        resumption = self.resumptions.next()
        if resumption is None:
            return answer
        return self.resumptions.advance(resumption, resumption.piece_end(CONTEXT_TOKENS), 0.0, 0.0)

    async def _hand_over(self, unsaid: TokenEntry) -> None:
        self.plan.is_done = True
        assert self.rounds.migration_id is not None
        command = HandOver(migration_id=self.rounds.migration_id, instance_id=self.route.instance_id, scheduler_epoch=1)
        self.rounds.hand_over(command)
        moved, _ = self.rounds.stop(0.0)
        self._turn = None
        self.requests.end_turn()
        for sequence in moved:
            position = unsaid.position if unsaid.request_id == sequence.request_id else sequence.position
            await self._say(sequence.request.router_id, sequence.entry(position))

    async def _say(self, router_id: str, entry: TokenEntry) -> None:
        frame = TokenFrame(server_id=self.route.server_id, slot=self.route.slot, entries=(entry,))
        await self.bus.publish(self.bus.subjects.tokens(router_id), frame)
