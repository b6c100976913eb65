"""Owns the modelled server: its one worker, with the real cores of requests, sequences, rounds and resumptions, driven
as the service's shell drives them, and as much of an instance and of its storage agent as a migration needs.

The engine does one thing at a time. It is begun at once when there is something to do, and `step` ends it; so whatever
comes meanwhile comes while a step runs, as in the service.
"""

from __future__ import annotations

from collections.abc import Iterable

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Conflict, InstanceGone, InternalError, StaleEpoch, WhimbrelError
from whimbrel.wire.messages import (
    AbandonMigration,
    AbortInference,
    AgentHeartbeat,
    CancelLoad,
    HandOver,
    InferenceResumed,
    InstanceBecameReady,
    InstanceEnded,
    LoadFinished,
    LoadModel,
    Message,
    MigrateInstance,
    PrepareInstance,
    ResendResidency,
    ResendTokens,
    ResidentModel,
    ResumeInference,
    Route,
    StartInference,
    StartRound,
    Tier,
    TokenEntry,
    TokenFrame,
    UnloadInstance,
    UnloadRefused,
    WorkerExited,
    WorkerHeartbeat,
    WorkerState,
)

from services.gpu_worker.core.requests import Requests
from services.gpu_worker.core.resumptions import Resumption, Resumptions, refusal
from services.gpu_worker.core.round_states import State
from services.gpu_worker.core.rounds import Output, Rounds
from services.gpu_worker.core.sequence import Sequence
from tests.simulation.model.answers import (
    MODEL_ID,
    ROUTER,
    SCHEDULER,
    Call,
    ResendAnswered,
    Sent,
    StartAnswered,
    next_token,
)

SIZE_BYTES = 10**6
SLOT = 0
PIECE_TOKENS_MAX = 16


class ModelWorker:
    """`epoch` is the worker's life; its agent never dies."""

    def __init__(self, server_id: str, instance_id: str | None) -> None:
        self.server_id = server_id
        self.epoch = 1
        self.is_alive = True
        self.load: LoadModel | None = None
        self.out: list[Sent] = []
        self._scheduler_epoch = 0
        self._begin_life(instance_id)

    def _begin_life(self, instance_id: str | None) -> None:
        self.instance_id = instance_id
        self.state = WorkerState.EMPTY if instance_id is None else WorkerState.READY
        self.requests = Requests(active_max=4, queue=self.server_id)
        self.rounds = Rounds(self.requests, server_id=self.server_id, slot=SLOT)
        self.resumptions = Resumptions()
        self.ended: tuple[str, ...] = ()
        self._kv_caches: dict[str, list[int]] = {}
        self._destination: Route | None = None
        self._turn: Sequence | None = None
        self._resumption: Resumption | None = None
        self._end = 0
        self._is_resumption_next = False
        self._is_decoding = False

    # What the model checker does.

    def hear(self, message: Message | Call, now: float) -> None:
        if isinstance(message, Call):
            self._answer(message.message, now)
        elif isinstance(message, LoadModel | CancelLoad | ResendResidency):
            self._hear_agent(message)
        elif self.is_alive:
            self._obey(message, now)
        if self.is_alive:
            self._go_on(now)

    @property
    def may_step(self) -> bool:
        """Whether the engine runs a step, or the model is being loaded."""
        if not self.is_alive:
            return False
        return self.load is not None or self._is_decoding or self._resumption is not None

    @property
    def is_resuming(self) -> bool:
        """Whether the step that runs is of a request that runs elsewhere."""
        return self.is_alive and self._resumption is not None

    def step(self, now: float) -> None:
        """The engine's step ends, or the load."""
        if self.load is not None:
            self._end_load(self.load)
        elif self._resumption is not None:
            self._end_piece(self._resumption, now)
        else:
            assert self._turn is not None
            self._is_decoding = False
            self._decoded(self._turn, now)
        self._go_on(now)

    def fail(self, now: float) -> None:
        """The step that runs fails, which is one of a resumption."""
        resumption, self._resumption = self._resumption, None
        assert resumption is not None
        answer = self.resumptions.fail(resumption, InternalError(service="gpu_worker"))
        self._answer_source(resumption, answer)
        self._go_on(now)

    def kill(self, now: float) -> None:
        """The agent learns it from the kernel."""
        self.is_alive = False
        self.load = None
        self._begin_life(None)
        self._say(SCHEDULER, WorkerExited(server_id=self.server_id, slot=SLOT, worker_epoch=self.epoch))

    def tick(self, now: float, scheduler_epoch: int) -> None:
        if not self.is_alive:
            self.epoch += 1
            self.is_alive = True
        self._scheduler_epoch = max(self._scheduler_epoch, scheduler_epoch)
        self.requests.expire(now)
        self.resumptions.expire(now)
        self._tell(self.rounds.tick(now))
        self._go_on(now)

    def heartbeat(self) -> WorkerHeartbeat:
        return WorkerHeartbeat(
            server_id=self.server_id,
            slot=SLOT,
            epoch=self.epoch,
            device="cpu",
            state=self.state,
            instance_id=self.instance_id,
            model_id=None if self.instance_id is None else MODEL_ID,
            active_requests=self.requests.active,
            migration_id=self.rounds.migration_id,
        )

    def agent_heartbeat(self) -> AgentHeartbeat:
        tasks = () if self.load is None else (self.load.task_id,)
        return AgentHeartbeat(
            server_id=self.server_id,
            epoch=1,
            resident=(
                ResidentModel(
                    model_id=MODEL_ID,
                    checkpoint_digest=MODEL_ID,
                    tier=Tier.DRAM,
                    size_bytes=SIZE_BYTES,
                    dram_bytes=SIZE_BYTES,
                ),
            ),
            tasks=tasks,
            running=tasks,
            jobs=(),
            attached=() if self.instance_id is None else (self.instance_id,),
            pool_size_bytes=100 * SIZE_BYTES,
            pool_free_bytes=90 * SIZE_BYTES,
            ssd_size_bytes=100 * SIZE_BYTES,
            ssd_used_bytes=0,
            probe_bandwidth_bytes_per_s=1e9,
        )

    def running(self) -> list[tuple[str, int]]:
        """The starts of requests that run or wait here."""
        known = self.requests._by_id.values()
        return [(sequence.request_id, sequence.epoch) for sequence in known if not sequence.is_finished]

    def check(self) -> None:
        """What must hold in every state."""
        if self.rounds.state is State.STOPPED:
            assert not self.running(), f"{self.server_id}: has handed over, and still runs {self.running()}"
        if self.state is WorkerState.EMPTY:
            assert not self.running(), f"{self.server_id}: runs {self.running()} without an instance"

    # Messages.

    def _answer(self, message: Message, now: float) -> None:
        error: WhimbrelError | None = None
        try:
            if isinstance(message, StartInference):
                self._start(message, now)
            else:
                assert isinstance(message, ResendTokens)
                entries, _ = self.requests.resend(message.request_id, message.epoch, message.position)
                for entry in entries:
                    self._say_entry(entry)
        except WhimbrelError as raised:
            error = raised
        reply = None if error is None else error_reply(error)
        if isinstance(message, StartInference):
            answer: Message = StartAnswered(
                request_id=message.request_id, epoch=message.epoch, base_tokens=message.base_tokens, error=reply
            )
        else:
            answer = ResendAnswered(request_id=message.request_id, epoch=message.epoch, error=reply)
        self._say(ROUTER, answer)

    def _obey(self, message: Message, now: float) -> None:
        try:
            epoch = getattr(message, "scheduler_epoch", self._scheduler_epoch)
            if epoch < self._scheduler_epoch:
                raise StaleEpoch(epoch=epoch, current_epoch=self._scheduler_epoch)
            self._scheduler_epoch = epoch
            self._do(message, now)
        except WhimbrelError:
            return  # nobody waits for the answer to a command

    def _do(self, message: Message, now: float) -> None:
        match message:
            case PrepareInstance():
                pass
            case AbortInference():
                ended = self.requests.abort(message.request_id, message.epoch, now)
                self._after_abort([] if ended is None else [ended], now)
            case UnloadInstance():
                self._unload(message)
            case MigrateInstance():
                known = self.rounds.migration_id
                is_here = message.instance_id == self.instance_id
                outputs = self.rounds.migrate(message, now, is_here=is_here)
                if self.rounds.migration_id != known:
                    self._destination = message.destination
                self._tell(outputs)
            case StartRound():
                self._tell(self.rounds.start_round(message, now))
            case HandOver():
                self._tell(self.rounds.hand_over(message))
            case AbandonMigration():
                self.rounds.abandon(message)
                self.resumptions.abandon(message.migration_id)
            case ResumeInference():
                self._resume(message, now)
            case InferenceResumed():
                self._tell(self.rounds.on_resumed(message, now))
            case _:
                raise AssertionError(f"{message} is no command to a worker")

    # The instance.

    def _hear_agent(self, message: Message) -> None:
        match message:
            case LoadModel() if self.is_alive and self.instance_id is None and message.instance_id not in self.ended:
                self.load = message
            case CancelLoad() if self.load is not None and self.load.task_id == message.task_id:
                self.load = None

    def _end_load(self, load: LoadModel) -> None:
        self.load = None
        self.instance_id, self.state = load.instance_id, WorkerState.READY
        finished = LoadFinished(
            task_id=load.task_id,
            instance_id=load.instance_id,
            model_id=load.model_id,
            server_id=self.server_id,
            source_tier=Tier.DRAM,
            queue_s=0.0,
            reports=(),
        )
        ready = InstanceBecameReady(
            instance_id=load.instance_id,
            model_id=load.model_id,
            server_id=self.server_id,
            slot=SLOT,
            worker_epoch=self.epoch,
            skeleton_s=0.0,
            bind_s=0.0,
        )
        self._say(SCHEDULER, finished)
        self._say(SCHEDULER, ready)

    def _unload(self, message: UnloadInstance) -> None:
        if message.instance_id != self.instance_id:
            self.ended = (*self.ended, message.instance_id)
            if self.load is not None and self.load.instance_id == message.instance_id:
                self.load = None
        elif self.requests.active == 0:
            self._empty()
        elif message.drain:
            self.state = WorkerState.DRAINING
            self.resumptions.clear()
        elif self.state is not WorkerState.DRAINING:
            self._say(SCHEDULER, UnloadRefused(instance_id=message.instance_id))

    def _empty(self) -> None:
        assert self.instance_id is not None
        ended = self.instance_id
        self.ended = (*self.ended, ended)
        self.instance_id, self.state = None, WorkerState.EMPTY
        self.resumptions.clear()
        self.rounds.leave()
        self._say(SCHEDULER, InstanceEnded(instance_id=ended, model_id=MODEL_ID, server_id=self.server_id, slot=SLOT))

    def check_serving(self, instance_id: str) -> None:
        is_here = instance_id == self.instance_id and self.state is WorkerState.READY
        if not is_here or self.rounds.migration_id is not None:
            raise InstanceGone(instance_id=instance_id)

    # Requests.

    def _start(self, message: StartInference, now: float) -> None:
        if self.requests.knows(message.request_id, message.epoch):
            return
        self.check_serving(message.instance_id)
        request = self.resumptions.complete(message)
        was_active = self.requests.is_active(request.request_id)
        sequence = self.requests.start(request, now)
        assert sequence is not None
        sequence.computed = self.resumptions.take(request, sequence.tokens)
        if was_active or sequence.is_finished:
            self.resumptions.dropped.append(sequence.request_id)
        if sequence.is_finished:
            self._say_entry(sequence.entry(sequence.position))
        self._note_change()

    def _resume(self, message: ResumeInference, now: float) -> None:
        try:
            self.check_serving(message.instance_id)
            if self.requests.is_active(message.request_id):
                raise Conflict(reason=f"request {message.request_id!r} runs here already")
            answer = self.resumptions.hear(message, now)
        except WhimbrelError as error:
            answer = refusal(message.migration_id, message.request_id, error)
        if answer is not None:
            self._say(message.source_server_id, answer)

    # The engine.

    def _go_on(self, now: float) -> None:
        """Begin what comes next, unless a step runs."""
        while not self._is_decoding and self._resumption is None:
            self._forget_dropped()
            if self._turn is None and not self.rounds.is_stopping:
                self._turn = self.requests.next(now)
            turn, resumption = self._turn, self.resumptions.next()
            if turn is not None and turn.is_finished:
                self._end_turn(turn, None, now)
            elif self.rounds.is_stopping:
                self._hand_over(None, now)
            elif turn is not None and not (self._is_resumption_next and resumption is not None):
                self._is_resumption_next = self._is_decoding = True
            elif resumption is not None:
                self._is_resumption_next = False
                self._resumption, self._end = resumption, resumption.piece_end(PIECE_TOKENS_MAX)
            else:
                return

    def _forget_dropped(self) -> None:
        while self.resumptions.dropped:
            self._kv_caches.pop(self.resumptions.dropped.popleft(), None)

    def _compute(self, known: Sequence | Resumption, end: int) -> None:
        """An engine goes on from a KV cache of other tokens without noticing; we do notice."""
        computed = self._kv_caches.get(known.request_id, [])
        assert computed == known.tokens[: len(computed)], f"{known.request_id}: the KV cache is that of other tokens"
        self._kv_caches[known.request_id] = known.tokens[: max(end, len(computed))]

    def _decoded(self, sequence: Sequence, now: float) -> None:
        self._compute(sequence, len(sequence.tokens))
        entry = sequence.advance(next_token(sequence.request_id, list(sequence.tokens)), now)
        if sequence.is_finished:
            self._end_turn(sequence, entry, now)
        elif entry is not None and self.rounds.is_stopping:
            self._hand_over(entry, now)
        elif entry is not None:
            self._say_entry(entry)

    def _end_piece(self, resumption: Resumption, now: float) -> None:
        self._resumption = None
        self._compute(resumption, self._end)
        self._answer_source(resumption, self.resumptions.advance(resumption, self._end, 0.0, now))

    def _end_turn(self, sequence: Sequence, last: TokenEntry | None, now: float) -> None:
        self._turn = None
        self.requests.end_turn()
        outputs = self.rounds.on_requests_ended(now)
        if last is not None:
            self._say_entry(last)
        self._tell(outputs)
        self.resumptions.dropped.append(sequence.request_id)
        self._note_change()

    def _hand_over(self, unsaid: TokenEntry | None, now: float) -> None:
        moved, stopped = self.rounds.stop(now)
        if self._turn is not None:
            self._turn = None
            self.requests.end_turn()
        for sequence in moved:
            is_last_step = unsaid is not None and unsaid.request_id == sequence.request_id
            position = unsaid.position if unsaid is not None and is_last_step else sequence.position
            self._say_entry(sequence.entry(position))
            self.resumptions.dropped.append(sequence.request_id)
        self._tell([stopped])
        self._note_change()

    def _after_abort(self, ended: list[Sequence], now: float) -> None:
        outputs = self.rounds.on_requests_ended(now)
        for sequence in ended:
            if sequence is not self._turn:
                self.resumptions.dropped.append(sequence.request_id)
            self._say_entry(sequence.entry(sequence.position))
        self._tell(outputs)
        self._note_change()

    def _note_change(self) -> None:
        if self.state is WorkerState.DRAINING and self.requests.active == 0:
            self._empty()

    # What is said.

    def _say(self, to: str, message: Message) -> None:
        self.out.append((to, message))

    def _say_entry(self, entry: TokenEntry) -> None:
        self._say(ROUTER, TokenFrame(server_id=self.server_id, slot=SLOT, entries=(entry,)))

    def _answer_source(self, resumption: Resumption, answer: InferenceResumed | None) -> None:
        if answer is not None:
            self._say(resumption.source[0], answer)

    def _tell(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            if isinstance(output, ResumeInference):
                assert self._destination is not None
                self._say(self._destination.server_id, output)
            else:
                self._say(SCHEDULER, output)
