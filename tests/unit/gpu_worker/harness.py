"""A worker as the others see it: they speak to it over a bus in memory, and remember what it said."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from whimbrel.chassis.bus import Received
from whimbrel.chassis.service import serve
from whimbrel.chassis.testing import InMemoryBus, InMemoryHub
from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.messages import (
    Ack,
    ActivateInstance,
    AttachInstance,
    InstanceBecameReady,
    InstanceEnded,
    Message,
    PrepareInstance,
    RouterHeartbeat,
    StartInference,
    TokenEntry,
    TokenFrame,
    UnloadInstance,
    WorkerHeartbeat,
    WorkerState,
)

from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.core.sequence import Sequence
from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine
from services.gpu_worker.engines.engine import Decoded, Engine, Precision
from services.gpu_worker.engines.transformers_engine import TransformersEngine
from services.gpu_worker.service import WorkerService
from tests.unit.gpu_worker.builders import Lender, a_request
from tests.unit.gpu_worker.tiny_models import TinyModel

M = TypeVar("M", bound=Message)

# Far above what anything here takes, so that only a real hang ends in it.
ANSWER_S_MAX = 20.0


class Stepped:
    """An engine each of whose steps waits until the test allows it. `unload` and the like do not wait."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._allowed = threading.Semaphore(0)
        self._begun = threading.Semaphore(0)
        self._steps = threading.Semaphore(0)
        self.decodes = 0
        self.failure: Exception | None = None

    def allow(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._allowed.release()

    def decode(self, sequence: Sequence) -> Decoded:
        self._begun.release()
        assert self._allowed.acquire(timeout=ANSWER_S_MAX), "no step was allowed"
        if self.failure is not None:
            raise self.failure
        self.decodes += 1
        decoded: Decoded = super().decode(sequence)  # type: ignore[misc]
        self._steps.release()
        return decoded

    def wait_for_steps(self, steps: int) -> None:
        """Returns when so many steps have been taken since the last call; blocks."""
        for _ in range(steps):
            assert self._steps.acquire(timeout=ANSWER_S_MAX), "a step was not taken"

    def wait_for_begun(self, steps: int) -> None:
        """Returns when so many steps have begun since the last call; blocks."""
        for _ in range(steps):
            assert self._begun.acquire(timeout=ANSWER_S_MAX), "a step was not begun"


class SteppedEngine(Stepped, EchoEngine):
    def __init__(self, costs: EchoCosts | None = None) -> None:
        super().__init__(costs or EchoCosts())


class SteppedModel(Stepped, TransformersEngine):
    def __init__(self) -> None:
        super().__init__(precision=Precision.FLOAT32, threads=1)


class Outside:
    """The scheduler, the agent and two routers, in so far as this worker has to do with them. What another worker on
    the same hub says of itself is not heard."""

    def __init__(self, hub: InMemoryHub, config: WorkerConfig, lender: Lender, model: TinyModel) -> None:
        self.hub = hub
        self.bus: InMemoryBus = hub.bus()
        self.config = config
        self.lender = lender
        self.model = model
        self.heard: list[Message] = []
        self._news = asyncio.Condition()

    async def listen(self) -> None:
        subjects = self.bus.subjects
        for pattern in (
            subjects.all_to_scheduler(),
            subjects.all_heartbeats("worker"),
            subjects.tokens("router-a"),
            subjects.tokens("router-b"),
        ):
            await self.bus.subscribe(pattern, self._hear)

    async def _hear(self, received: Received) -> None:
        if getattr(received.message, "server_id", self.config.server_id) != self.config.server_id:
            return
        async with self._news:
            self.heard.append(received.message)
            self._news.notify_all()

    async def until(self, claim: Callable[[], bool]) -> None:
        """Returns when `claim` holds; looks again whenever something was heard."""
        async with asyncio.timeout(ANSWER_S_MAX), self._news:
            await self._news.wait_for(claim)

    async def ask(self, message: Message) -> Message:
        subject = self.bus.subjects.to_worker(self.config.server_id, self.config.slot, message)
        return await self.bus.request(subject, message, timeout_s=ANSWER_S_MAX)

    async def tell(self, message: Message) -> None:
        subject = self.bus.subjects.to_worker(self.config.server_id, self.config.slot, message)
        await self.bus.publish(subject, message)

    async def beat_as_router(self, router_id: str, epoch: int) -> None:
        beat = RouterHeartbeat(router_id=router_id, epoch=epoch, active=(), waiting_requests=0, oldest_wait_s=0.0)
        await self.bus.publish(self.bus.subjects.heartbeat(beat), beat)

    # Loading.

    def prepare(self, instance_id: str = "inst-1", **changes: Any) -> PrepareInstance:
        fields = {"model_id": "m", "model_config": self.model.config, "scheduler_epoch": 1}
        return PrepareInstance(instance_id=instance_id, **(fields | changes))

    def attach(self, instance_id: str = "inst-1", **changes: Any) -> AttachInstance:
        return self.lender.lend(self.model.checkpoint, instance_id, **changes)

    async def load(self, instance_id: str = "inst-1") -> AttachInstance:
        """Until the instance is ready; the answer tells what was lent."""
        await self.tell(self.prepare(instance_id))
        attach = self.attach(instance_id)
        await self.ask(attach)
        await self.ask(ActivateInstance(instance_id=instance_id))
        await self.until(lambda: self.state_of(instance_id) is WorkerState.READY)
        return attach

    def unload(self, instance_id: str = "inst-1", *, drain: bool = False, epoch: int = 1) -> UnloadInstance:
        return UnloadInstance(instance_id=instance_id, drain=drain, scheduler_epoch=epoch)

    # What was heard.

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.heard if isinstance(message, kind)]

    @property
    def beat(self) -> WorkerHeartbeat:
        return self.all(WorkerHeartbeat)[-1]

    def state_of(self, instance_id: str) -> WorkerState | None:
        beats = self.all(WorkerHeartbeat)
        return beats[-1].state if beats and beats[-1].instance_id == instance_id else None

    def has_ended(self, instance_id: str = "inst-1") -> bool:
        return any(ended.instance_id == instance_id for ended in self.all(InstanceEnded))

    def ready(self) -> list[str]:
        return [ready.instance_id for ready in self.all(InstanceBecameReady)]

    def entries(self, request_id: str = "req-1") -> list[TokenEntry]:
        return [e for frame in self.all(TokenFrame) for e in frame.entries if e.request_id == request_id]

    def tokens(self, request_id: str = "req-1") -> list[int]:
        """What a router would have, which takes every position once and in order."""
        tokens: list[int] = []
        for entry in self.entries(request_id):
            assert entry.position <= len(tokens), f"gap before {entry.position}"
            tokens[entry.position :] = unpack_tokens(entry.tokens)
        return tokens

    def is_finished(self, request_id: str = "req-1") -> bool:
        return any(entry.finish_reason is not None for entry in self.entries(request_id))

    async def answer(self, request: StartInference) -> list[int]:
        assert isinstance(await self.ask(request), Ack)
        await self.until(lambda: self.is_finished(request.request_id))
        return self.tokens(request.request_id)


def a_config(**changes: Any) -> WorkerConfig:
    return WorkerConfig(**({"server_id": "server-1", "slot": 3, "prewarm": False} | changes))


@asynccontextmanager
async def a_worker(
    lender: Lender,
    model: TinyModel,
    engine: Engine | None = None,
    *,
    clock: Callable[[], float] | None = None,
    stop: asyncio.Event | None = None,
    hub: InMemoryHub | None = None,
    **changes: Any,
) -> AsyncIterator[Outside]:
    """A running worker with the echo engine, or `engine`; it has left without a trace when the block ends."""
    config = a_config(**changes)
    hub = hub or InMemoryHub()
    outside = Outside(hub, config, lender, model)
    await outside.listen()
    stop = stop or asyncio.Event()
    engine = engine or EchoEngine(EchoCosts())
    options = {} if clock is None else {"clock": clock}
    service = WorkerService(config, lambda: engine, bus=hub.bus(name="worker"), **options)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(serve(service, stop, drain_s_max=5.0))
        try:
            await outside.until(lambda: bool(outside.heard))
            yield outside
        finally:
            stop.set()
            if isinstance(engine, Stepped):
                engine.allow(10_000)
            await serving
            await outside.bus.drain()


def is_locked(attach: AttachInstance) -> bool:
    """As the agent tests it."""
    with open(attach.lease_path, "rb") as lease:
        try:
            fcntl.flock(lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def long_request(request_id: str = "req-1", **changes: Any) -> StartInference:
    """One that takes 20 steps to answer."""
    return a_request(request_id, **({"prompt": range(1, 21), "output_tokens_max": 100} | changes))
