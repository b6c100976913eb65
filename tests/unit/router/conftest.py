"""A router under test between a fake scheduler and a fake worker, on a hub in memory and a real HTTP port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from whimbrel.chassis.service import serve
from whimbrel.chassis.testing import InMemoryHub
from whimbrel.wire.messages import FinishReason

from services.router import dispatch, outputs
from services.router.config import RouterConfig
from services.router.core import requests
from services.router.service import RouterService
from tests.unit.router.model_files import byte_level_tokenizer, write_model
from tests.unit.router.peers import FakeScheduler, FakeWorker, a_model, a_route

MODEL = "tiny"
ANSWER = "Paris is the capital, 日本 😀."


@dataclass
class Bench:
    """Everything a test of the whole router needs. `other` is a worker for requests that go on elsewhere: at first,
    nobody knows a route to it."""

    hub: InMemoryHub
    scheduler: FakeScheduler
    worker: FakeWorker
    other: FakeWorker
    service: RouterService
    client: httpx.AsyncClient
    tokenizer: Tokenizer

    def chat(self, **more: object) -> dict[str, object]:
        return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], **more}

    async def post(self, path: str = "/v1/chat/completions", **body: object) -> httpx.Response:
        return await self.client.post(path, json=body if "model" in body else self.chat(**body))

    async def reset(self) -> None:
        """As new: no route, nothing heard, both peers as they were made."""
        for route in (*self.scheduler.routes.values(), a_route(MODEL, "instance-2", slot=1)):
            await self.scheduler.remove_route(route)
        for peer in (self.scheduler, self.worker, self.other):
            peer.heard.clear()
        self.scheduler.models = {MODEL: a_model(MODEL)}
        self.scheduler.jobs.clear()
        self.scheduler.errors.clear()
        self.scheduler.taken_out.clear()
        self.scheduler.held.clear()
        self.scheduler.explanations.clear()
        answer = self.tokenizer.encode(ANSWER).ids
        for worker, instance_id in ((self.worker, "instance-1"), (self.other, "instance-2")):
            worker.output = lambda _request: answer
            worker.instance_id = instance_id
            worker.finish_reason, worker.error = FinishReason.STOP, None
            worker.is_held, worker.frames_before_hold = False, None
            worker.mangle = list
            worker.refusal = None
            worker.forgets_requests = False
            worker.requests.clear()
            worker.resumed.clear()
        self.hub.events.clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patience in tenths of seconds where the shipped router has seconds."""
    monkeypatch.setattr(requests, "RESEND_AFTER_S", 0.1)
    monkeypatch.setattr(requests, "REFUSED_S", 0.1)
    monkeypatch.setattr(requests, "PLACE_EVERY_S", 0.1)
    monkeypatch.setattr(outputs, "HEADERS_HELD_S", 0.2)
    monkeypatch.setattr(dispatch, "HEARTBEAT_S", 0.2)
    monkeypatch.setattr(dispatch, "TICK_S", 0.02)
    monkeypatch.setattr(dispatch, "STALLED_S", 0.2)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    root = tmp_path_factory.mktemp("repository")
    write_model(root / "tiny", tokenizer)
    write_model(root / "tiny2", tokenizer)
    write_model(root / "no-template", tokenizer, chat_template=None)
    return root


MakeBench = Callable[..., AbstractAsyncContextManager[Bench]]


def bench_maker(cache_dir: Path, repository: Path, tokenizer: Tokenizer) -> MakeBench:
    @asynccontextmanager
    async def make(models: Sequence[str] = (MODEL,), **config: object) -> AsyncIterator[Bench]:
        hub = InMemoryHub()
        scheduler = FakeScheduler(hub.bus(name="scheduler"))
        scheduler.models = {name: a_model(name) for name in models}
        answer = tokenizer.encode(ANSWER).ids
        worker = FakeWorker(hub.bus(name="worker"), lambda _request: answer)
        await scheduler.start()
        await worker.start()
        other = FakeWorker(hub.bus(name="other"), lambda _request: answer, slot=1, instance_id="instance-2")
        await other.start()
        settings = {"repository_url": repository.as_uri(), "cache_dir": cache_dir, "http_port": 0, **config}
        service = RouterService(RouterConfig(**settings), hub.bus(name="router"))  # type: ignore[arg-type]
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(serve(service, stop))
            beating = group.create_task(_beat(scheduler, worker, other))
            try:
                async with asyncio.timeout(30):
                    while service.readiness() is not None:
                        assert not serving.done()
                        await asyncio.sleep(0.005)
                async with httpx.AsyncClient(base_url=service.url, timeout=20, verify=False) as client:
                    yield Bench(hub, scheduler, worker, other, service, client, tokenizer)
            finally:
                stop.set()
                await asyncio.wait({serving})
                beating.cancel()
                await scheduler.bus.drain()
                await worker.bus.drain()
                await other.bus.drain()

    return make


@pytest.fixture
def make_bench(tmp_path: Path, repository: Path, tokenizer: Tokenizer) -> MakeBench:
    return bench_maker(tmp_path / "cache", repository, tokenizer)


@pytest.fixture
async def bench(make_bench: MakeBench) -> AsyncIterator[Bench]:
    """A router of this test alone."""
    async with make_bench() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_bench(
    tmp_path_factory: pytest.TempPathFactory, repository: Path, tokenizer: Tokenizer
) -> AsyncIterator[Bench]:
    """A router for all tests of a module, which get it one after the other and as new."""
    async with bench_maker(tmp_path_factory.mktemp("cache"), repository, tokenizer)() as made:
        yield made


async def _beat(*peers: FakeScheduler | FakeWorker) -> None:
    while True:
        for peer in peers:
            if not peer.is_mute:
                await peer.beat()
        await asyncio.sleep(0.1)
