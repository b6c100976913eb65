"""What an operator asks of one server: its tiers, its queue, its disk."""

from __future__ import annotations

import pytest
import pytest_asyncio
from whimbrel.wire.errors import Conflict
from whimbrel.wire.messages import (
    CordonServer,
    EvictModel,
    GetLoads,
    GetLoadsReply,
    LoadSummary,
    MeasureStorage,
    MeasureStorageReply,
    Message,
    ModelState,
    PinModel,
    PrefetchModel,
    Tier,
    UncordonServer,
    UnpinModel,
    WaitStage,
)

from tests.unit.router.conftest import Bench
from tests.unit.router.peers import FakeAgent, a_model
from tests.unit.router.test_http import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

SERVER = "/admin/servers/server-0"


@pytest_asyncio.fixture(loop_scope="module")
async def bench(module_bench: Bench) -> Bench:
    await module_bench.reset()
    module_bench.scheduler.servers = ("server-0", "server-1")
    return module_bench


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_agent(module_bench: Bench) -> FakeAgent:
    agent = FakeAgent(module_bench.hub.bus(name="agent"))
    await agent.start()
    return agent


@pytest_asyncio.fixture(loop_scope="module")
async def agent(module_agent: FakeAgent) -> FakeAgent:
    module_agent.heard.clear()
    module_agent.answers.clear()
    return module_agent


async def test_a_model_is_prefetched_with_the_digest_that_is_deployed(bench: Bench, agent: FakeAgent) -> None:
    """E3"""
    bench.scheduler.models["org/m"] = a_model("org/m", digest="d7")
    response = await bench.client.post(f"{SERVER}/models/org/m/prefetch", json={"tier": "dram", "pin": True})
    (command,) = agent.heard.all(PrefetchModel)
    assert (command.model_id, command.checkpoint_digest, command.tier, command.is_pinned) == (
        "org/m", "d7", Tier.DRAM, True,
    )  # fmt: skip
    assert (response.status_code, response.json()) == (
        202,
        {"server": "server-0", "model": "org/m", "tier": "dram", "task_id": command.task_id, "pin": True},
    )


@pytest.mark.parametrize(
    ("verb", "expected"),
    [
        ("pin", PinModel(model_id="tiny", tier=Tier.SSD)),
        ("unpin", UnpinModel(model_id="tiny", tier=Tier.SSD)),
        ("evict", EvictModel(model_id="tiny", tier=Tier.SSD)),
    ],
)
async def test_a_model_is_pinned_unpinned_and_evicted(
    bench: Bench, agent: FakeAgent, verb: str, expected: Message
) -> None:
    response = await bench.client.post(f"{SERVER}/models/tiny/{verb}", json={"tier": "ssd"})
    assert (response.status_code, response.json()) == (202, {"server": "server-0", "model": "tiny", "tier": "ssd"})
    assert agent.heard.all(type(expected)) == [expected]


async def test_an_agent_s_refusal_is_the_answer(bench: Bench, agent: FakeAgent) -> None:
    agent.answers[EvictModel] = Conflict(reason="tiny is used by instance-1")
    response = await bench.client.post(f"{SERVER}/models/tiny/evict", json={"tier": "dram"})
    assert error_of(response) == (409, "conflict", None)
    assert "instance-1" in response.text


async def test_what_is_not_there_is_named(bench: Bench, agent: FakeAgent) -> None:
    post = bench.client.post
    response = await post("/admin/servers/absent/models/tiny/pin", json={"tier": "ssd"})
    assert error_of(response) == (404, "server_not_found", None)
    assert "server-0, server-1" in response.text
    assert error_of(await post(f"{SERVER}/models/absent/pin", json={"tier": "ssd"})) == (
        404, "model_not_found", "model",
    )  # fmt: skip
    bench.scheduler.models["new"] = a_model("new", state=ModelState.IMPORTING, digest="")
    assert error_of(await post(f"{SERVER}/models/new/prefetch", json={"tier": "ssd"})) == (409, "conflict", None)
    assert error_of(await bench.client.get("/admin/servers/absent/loads")) == (404, "server_not_found", None)


@pytest.mark.parametrize(
    ("verb", "body", "field"),
    [
        ("pin", {}, "tier"),
        ("pin", {"tier": "gpu"}, "tier"),
        ("pin", {"tier": "remote"}, "tier"),
        ("pin", {"tier": 1}, "tier"),
        ("pin", {"tier": "ssd", "pin": True}, "pin"),
        ("prefetch", {"tier": "ssd", "pin": "yes"}, "pin"),
        ("evict", [], "body"),
    ],
    ids=str,
)
async def test_a_command_that_makes_no_sense_is_refused_by_field(
    bench: Bench, agent: FakeAgent, verb: str, body: object, field: str
) -> None:
    response = await bench.client.post(f"{SERVER}/models/tiny/{verb}", json=body)
    assert error_of(response) == (400, "invalid_request", field)


async def test_a_server_shows_its_queue(bench: Bench, agent: FakeAgent) -> None:
    """E5"""
    load = LoadSummary(
        task_id="t1", instance_id="i1", model_id="tiny", stage=WaitStage.FETCHING, source_tier=Tier.REMOTE,
        done_bytes=5, total_bytes=9, running_s=1.5, remaining_s=1.2,
    )  # fmt: skip
    agent.answers[GetLoads] = GetLoadsReply(loads=(load,))
    answer = (await bench.client.get(f"{SERVER}/loads")).json()
    assert answer["server"] == "server-0"
    assert answer["loads"][0]["remaining_s"] == 1.2
    assert answer["loads"][0]["stage"] == "fetching"


async def test_a_server_measures_its_storage(bench: Bench, agent: FakeAgent) -> None:
    agent.answers[MeasureStorage] = MeasureStorageReply(
        server_id="server-0", ssd_directory="/ssd", ssd_direct_bytes_per_s=2e9, ssd_buffered_bytes_per_s=1e9,
        is_direct=True, pool_size_bytes=100, has_huge_pages=False, is_locked=True, warnings=("no huge pages",),
    )  # fmt: skip
    answer = (await bench.client.post(f"{SERVER}/measure")).json()
    assert (answer["server"], answer["is_direct"], answer["warnings"]) == ("server-0", True, ["no huge pages"])


async def test_a_server_is_taken_out_and_brought_back(bench: Bench) -> None:
    """Whether its agent lives or not: the scheduler decides."""
    bench.scheduler.held["server-1"] = ("instance-1",)
    server = "/admin/servers/server-1"
    for order, is_cordoned, is_draining in (("cordon", True, False), ("drain", True, True), ("uncordon", False, False)):
        response = await bench.client.post(f"{server}/{order}")
        assert (response.status_code, response.json()) == (
            200,
            {
                "server": "server-1",
                "is_cordoned": is_cordoned,
                "is_draining": is_draining,
                "instances": ["instance-1"],
            },
        )
    orders = bench.scheduler.heard.all(CordonServer)
    assert orders == [CordonServer(server_id="server-1"), CordonServer(server_id="server-1", drain=True)]
    assert bench.scheduler.heard.all(UncordonServer) == [UncordonServer(server_id="server-1")]
    response = await bench.client.post("/admin/servers/absent/drain")
    assert error_of(response) == (404, "server_not_found", None)
    assert "server-0, server-1" in response.text


async def test_an_agent_that_is_away_is_a_503(bench: Bench, agent: FakeAgent) -> None:
    response = await bench.client.get("/admin/servers/server-1/loads")
    assert error_of(response) == (503, "unavailable", None)
