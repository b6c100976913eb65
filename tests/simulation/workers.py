"""Owns the simulated GPU worker: the real cores of the service (instance here, the others in `inferences`), driven as
its shell drives them, around an engine that only takes time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from whimbrel.wire.codec import error_reply
from whimbrel.wire.errors import Conflict, InstanceGone, LoadFailed, Unavailable, WhimbrelError
from whimbrel.wire.messages import (
    AbandonMigration,
    AbortInference,
    Ack,
    ActivateInstance,
    AttachInstance,
    AttachInstanceReply,
    DetachInstance,
    HandOver,
    InferenceResumed,
    InstanceBecameReady,
    InstanceEnded,
    Message,
    MigrateInstance,
    PrepareInstance,
    ResendTokens,
    ResumeInference,
    RouterHeartbeat,
    SchedulerHeartbeat,
    StartInference,
    StartRound,
    UnloadInstance,
    UnloadRefused,
    WorkerHeartbeat,
    WorkerState,
)

from services.gpu_worker.core.instance import LEAVING, SERVING, WORKER_STATES, Instance, State, Work
from services.gpu_worker.core.instance_events import (
    Emptied,
    Event,
    ModelActivated,
    SkeletonBuilt,
    TensorsBound,
    WorkFailed,
)
from tests.simulation.clock import Promise
from tests.simulation.inferences import Inferences
from tests.simulation.leases import Holding, Lease
from tests.simulation.network import Answer, Call, Network
from tests.simulation.peers import Peer

#: How long the engine takes, seconds.
BUILD_S, BIND_S, ACTIVATE_S, UNLOAD_S = 0.05, 0.01, 0.002, 0.003
WATCH_S = 0.5


class SimWorker(Peer):
    """One slot. `leases` are those of its server by path; `token_s` says how long a token of a request takes."""

    heard_by = ("scheduler", "router", "agent")

    def __init__(
        self,
        network: Network,
        server_id: str,
        slot: int,
        *,
        epoch: int,
        device: str,
        memory_bytes: int,
        leases: dict[str, Lease],
        token_s: Callable[[str], float],
    ) -> None:
        self.server_id, self.slot = server_id, slot
        self.device, self.memory_bytes = device, memory_bytes
        self.leases = leases
        self.instance: Instance | None = None
        self.holding = Holding()
        self.inferences = Inferences(self, token_s)
        #: The next pieces of the engine's work that fail, by what is done.
        self.failures: list[Work] = []
        self._ended: deque[str] = deque(maxlen=64)
        self._emptied: Promise[None] = Promise(network.clock)
        self._emptied.keep_nothing()
        self._free_s = 0.0
        super().__init__(network, ("worker", server_id, slot), epoch)
        self.every(WATCH_S, self.inferences.watch)
        self.beat()

    def kill(self) -> None:
        """The kernel drops what it held."""
        self.is_alive = False
        self.network.leave(self)
        self.holding.give_back(but_current=False)

    @property
    def state(self) -> State:
        return State.EMPTY if self.instance is None else self.instance.state

    @property
    def held_slots(self) -> tuple[int, ...]:
        """The slots whose memory its instance takes."""
        lease = self.holding.current
        return lease.slots if lease is not None else (self.slot,) if self.instance is not None else ()

    def heartbeat(self) -> WorkerHeartbeat:
        state = WORKER_STATES[self.state]
        instance = None if state is WorkerState.EMPTY else self.instance
        return WorkerHeartbeat(
            server_id=self.server_id,
            slot=self.slot,
            epoch=self.epoch,
            device=self.device,
            memory_size_bytes=self.memory_bytes,
            state=state,
            instance_id=None if instance is None else instance.instance_id,
            model_id=None if instance is None else instance.model_id,
            active_requests=self.inferences.active,
            migration_id=self.inferences.rounds.migration_id,
        )

    # Commands.

    def hear(self, message: Message, call: Call | None) -> None:
        match message:
            case RouterHeartbeat():
                self.inferences.hear_router(message.router_id, message.epoch)
            case SchedulerHeartbeat():
                if message.epoch > self.scheduler_epoch:
                    self.scheduler_epoch = message.epoch
                    self.beat()
            case _:
                self.spawn(self._answer(message, call))

    async def _answer(self, message: Message, call: Call | None) -> None:
        answer: Answer
        try:
            answer = await self._obeyed(message)
        except WhimbrelError as error:
            answer = error
        if call is not None and self.is_alive:
            call.answer(self, answer)

    async def _obeyed(self, message: Message) -> Message:
        match message:
            case StartInference():
                self.inferences.start(message)
            case AbortInference():
                self.inferences.abort(message)
            case ResendTokens():
                self.inferences.resend(message)
            case PrepareInstance():
                self.obey(message.scheduler_epoch)
                instance = await self._instance_for(message.instance_id, message.model_id)
                self._do(instance, instance.prepare(self.now))
            case AttachInstance():
                return await self._attach(message)
            case ActivateInstance():
                instance = self._the(message.instance_id)
                self._do(instance, instance.verify(self.now))
            case UnloadInstance():
                self.obey(message.scheduler_epoch)
                if message.preempt and self.instance is not None and self.instance.instance_id == message.instance_id:
                    self.inferences.preempt()
                try:
                    await self._unload(message.instance_id, may_drain=message.drain)
                except Conflict:
                    self.tell_scheduler(UnloadRefused(instance_id=message.instance_id))
            case DetachInstance():
                await self._unload(message.instance_id, may_drain=True)
            case MigrateInstance():
                self.obey(message.scheduler_epoch)
                is_here = self.instance is not None and self.instance.instance_id == message.instance_id
                self.inferences.migrate(message, is_here=is_here and self.state in SERVING)
            case StartRound():
                self.obey(message.scheduler_epoch)
                self.inferences.start_round(message)
            case HandOver():
                self.obey(message.scheduler_epoch)
                self.inferences.hand_over(message)
            case AbandonMigration():
                self.obey(message.scheduler_epoch)
                self.inferences.abandon(message)
            case ResumeInference():
                self.inferences.resume(message)
            case InferenceResumed():
                self.inferences.on_resumed(message)
            case _:
                raise AssertionError(f"{message} is no command to a worker")
        return Ack()

    def _the(self, instance_id: str) -> Instance:
        if self.instance is None or self.instance.instance_id != instance_id:
            raise InstanceGone(instance_id=instance_id)
        return self.instance

    async def _instance_for(self, instance_id: str, model_id: str) -> Instance:
        if self.state is State.UNLOADING:
            await self._emptied
        if instance_id in self._ended:
            raise InstanceGone(instance_id=instance_id)
        if self.instance is None:
            self.instance = Instance(instance_id, model_id)
        if self.instance.instance_id != instance_id:
            raise Conflict(reason=f"instance {self.instance.instance_id!r} is on this slot; unload it first")
        return self.instance

    async def _attach(self, message: AttachInstance) -> AttachInstanceReply:
        instance = await self._instance_for(message.instance_id, message.model_id)
        if instance.wants_chunks(message.agent_epoch):
            lease = self.leases.get(message.lease_path)
            if lease is None or lease.is_ended:
                if instance.state is State.EMPTY:
                    self.instance = None
                raise Unavailable(what=f"the lease of instance {message.instance_id}")
            lease.holder = self
            self.holding.leases.append(lease)
            work = instance.attach(message.agent_epoch, self.now)
            self._do(instance, work)
            if work is not Work.BIND:
                self.holding.give_back(but_current=True)
        return AttachInstanceReply(handles=(b"",) * len(message.partitions))

    async def _unload(self, instance_id: str, *, may_drain: bool) -> None:
        if self.instance is None or self.instance.instance_id != instance_id:
            self._ended.append(instance_id)
            return
        is_idle = self.inferences.active == 0
        self._do(self.instance, self.instance.unload(self.now, is_idle=is_idle, may_drain=may_drain))
        if self.state is State.UNLOADING:
            await self._emptied

    # The instance and the engine.

    def _do(self, instance: Instance, work: Work | None) -> None:
        if instance.state is not State.EMPTY and self._emptied.is_kept:
            self._emptied = Promise(self.clock)
        match work:
            case Work.BUILD:
                self.perform(BUILD_S, lambda: self._on(instance, work, SkeletonBuilt()))
            case Work.BIND | Work.ACTIVATE:
                lease = self.holding.current
                self.perform(BIND_S if work is Work.BIND else ACTIVATE_S, lambda: self._bound(instance, work, lease))
            case Work.UNLOAD:
                self.perform(UNLOAD_S, lambda: self._empty(instance))
            case Work.ANNOUNCE:
                self.tell_scheduler(
                    InstanceBecameReady(
                        instance_id=instance.instance_id,
                        model_id=instance.model_id,
                        server_id=self.server_id,
                        slot=self.slot,
                        worker_epoch=self.epoch,
                        skeleton_s=instance.unhidden.skeleton_s,
                        bind_s=instance.unhidden.bind_s,
                    )
                )
            case Work.TELL_END:
                self.tell_scheduler(
                    InstanceEnded(
                        instance_id=instance.instance_id,
                        model_id=instance.model_id,
                        server_id=self.server_id,
                        slot=self.slot,
                        error=None if instance.error is None else error_reply(instance.error),
                    )
                )
        self.inferences.follow(self.state)
        self.beat()

    def perform(self, seconds: float, done: Callable[[], None]) -> None:
        """In the engine's thread: one thing after the other."""
        self._free_s = max(self.now, self._free_s) + seconds
        self.clock.after(self._free_s - self.now, self, done)

    def _bound(self, instance: Instance, work: Work, lease: Lease | None) -> None:
        if lease is self.holding.current:
            self._on(instance, work, TensorsBound() if work is Work.BIND else ModelActivated())
            if work is Work.BIND and instance.state not in LEAVING:
                self.holding.give_back(but_current=True)

    def _on(self, instance: Instance, work: Work, event: Event) -> None:
        if work in self.failures:
            self.failures.remove(work)
            event = WorkFailed(LoadFailed(model_id=instance.model_id, reason="the engine gave up"))
        self._do(instance, instance.on(event, self.now))

    def _empty(self, instance: Instance) -> None:
        self.holding.give_back(but_current=False)
        self.inferences.kv_caches.clear()
        self.instance = None
        self._ended.append(instance.instance_id)
        self._do(instance, instance.on(Emptied(), self.now))
        self._emptied.keep_nothing()

    def check_serving(self, instance_id: str) -> None:
        """Raises InstanceGone when this instance takes no request."""
        if self._the(instance_id).state is not State.READY or self.inferences.rounds.migration_id is not None:
            raise InstanceGone(instance_id=instance_id)

    def end_of_requests(self) -> None:
        """No request runs or waits: a draining instance goes."""
        if self.instance is not None:
            self._do(self.instance, self.instance.end_of_requests(self.now))
