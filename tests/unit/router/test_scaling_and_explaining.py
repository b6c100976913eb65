"""How models are scaled over HTTP, and what it says about why they are where they are."""

from __future__ import annotations

import pytest
import pytest_asyncio
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.messages import (
    CandidateSummary,
    DecisionSummary,
    DeployModel,
    ExplainModel,
    ExplainModelReply,
    ScaleModel,
    Scaling,
    Tier,
)

from tests.unit.router.conftest import Bench
from tests.unit.router.peers import a_model
from tests.unit.router.test_http import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def bench(module_bench: Bench) -> Bench:
    await module_bench.reset()
    return module_bench


async def test_a_deployment_says_how_it_is_scaled(bench: Bench) -> None:
    """R6"""
    body = {"model": "new", "source": "/models/new", "scaling": {"min_instances": 2, "target_concurrency": 4}}
    assert (await bench.client.post("/admin/models", json=body)).status_code == 202
    (command,) = bench.scheduler.heard.all(DeployModel)
    assert command.scaling == Scaling(min_instances=2, max_instances=2, target_concurrency=4)


async def test_scaling_is_changed_by_what_is_given(bench: Bench) -> None:
    """R6"""
    bench.scheduler.models["org/m"] = a_model("org/m")
    response = await bench.client.patch("/admin/models/org/m", json={"scaling": {"max_instances": 3}})
    assert bench.scheduler.heard.all(ScaleModel) == [ScaleModel(model_id="org/m", max_instances=3)]
    assert (response.status_code, response.json()) == (
        200,
        {
            "model": "org/m",
            "scaling": {"min_instances": 0, "max_instances": 3, "target_concurrency": 8},
            "keep_alive_s": 60.0,
            "desired_instances": 2,
        },
    )
    assert error_of(await bench.client.patch("/admin/models/org/m", json={})) == (400, "invalid_request", "body")
    bench.scheduler.errors[ScaleModel] = InvalidRequest(field="min_instances", reason="is 4, above max_instances")
    response = await bench.client.patch("/admin/models/org/m", json={"scaling": {"min_instances": 4}})
    assert error_of(response) == (400, "invalid_request", "min_instances")


async def test_a_model_is_explained(bench: Bench) -> None:
    candidate = CandidateSummary(server_id="server-0", refusal="busy: 1 running instance", source_tier=Tier.SSD)
    decision = DecisionSummary(outcome="deferred", policy="migration", age_s=2.0, candidates=(candidate,))
    bench.scheduler.models["org/m"] = a_model("org/m")
    bench.scheduler.explanations["org/m"] = ExplainModelReply(
        model_id="org/m", sentence="It waits.", waiting_requests=1, instances=(), last=decision, now=decision
    )
    body = (await bench.client.get("/admin/explain", params={"model": "org/m"})).json()
    assert (body["model"], body["sentence"], body["waiting_requests"]) == ("org/m", "It waits.", 1)
    (found,) = body["last"]["candidates"]
    assert (found["server_id"], found["refusal"], found["source_tier"]) == (
        "server-0", "busy: 1 running instance", "ssd",
    )  # fmt: skip
    assert bench.scheduler.heard.all(ExplainModel) == [ExplainModel(model_id="org/m")]


async def test_an_explanation_needs_a_model_that_is_there(bench: Bench) -> None:
    assert error_of(await bench.client.get("/admin/explain")) == (400, "invalid_request", "model")
    response = await bench.client.get("/admin/explain", params={"model": "absent"})
    assert error_of(response) == (404, "model_not_found", "model")
