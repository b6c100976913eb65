"""The engine of tests: it says the prompt once more, whatever is asked of it, and never needs torch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.gpu_worker.core.sequence import Sequence
from services.gpu_worker.engines.echo_engine import CONTEXT_TOKENS_DEFAULT, EchoCosts, EchoEngine
from services.gpu_worker.engines.engine import EngineError, Limits
from tests.unit.gpu_worker.builders import a_sequence

ROOT = Path(__file__).parents[3]


def answer(sequence: Sequence, engine: EchoEngine | None = None) -> list[int]:
    engine = engine or EchoEngine(EchoCosts())
    while not sequence.is_finished:
        sequence.advance(engine.decode(sequence).token, 0.0)
    engine.forget(sequence.request_id)
    return list(sequence.output)


def test_the_prompt_comes_back_once_and_then_the_output_stops() -> None:
    sequence = a_sequence(prompt=(5, 6, 7), output_tokens_max=50)
    assert answer(sequence) == [5, 6, 7]
    assert sequence.finish_reason == "stop"


def test_the_output_is_no_longer_than_asked_for() -> None:
    sequence = a_sequence(prompt=(5, 6, 7), output_tokens_max=2)
    assert answer(sequence) == [5, 6]
    assert sequence.finish_reason == "length"


def test_stop_tokens_in_the_prompt_come_back_too() -> None:
    assert answer(a_sequence(prompt=(5, 2, 7), stop_tokens=(2,), output_tokens_max=50)) == [5, 2, 7]


@pytest.mark.parametrize("begun", [0, 1, 2, 3])
def test_an_answer_that_was_begun_elsewhere_is_completed(begun: int) -> None:
    assert answer(a_sequence(prompt=(5, 6, 7), output=(5, 6, 7)[:begun], output_tokens_max=50)) == [5, 6, 7]


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        (b'{"vocab_size": 9, "max_position_embeddings": 64}', Limits(context_tokens=64, vocabulary_size=9)),
        (b'{"vocab_size": 9, "n_positions": 32}', Limits(context_tokens=32, vocabulary_size=9)),
        (b'{"vocab_size": 9}', Limits(context_tokens=CONTEXT_TOKENS_DEFAULT, vocabulary_size=9)),
        (b'{"text_config": {"vocab_size": 9}}', Limits(context_tokens=CONTEXT_TOKENS_DEFAULT, vocabulary_size=9)),
    ],
    ids=str,
)
def test_limits_come_from_the_configuration(config: bytes, limits: Limits) -> None:
    assert EchoEngine(EchoCosts()).prepare(config) == limits


@pytest.mark.parametrize("config", [b"", b"[]", b"{}", b'{"vocab_size": "many"}', b'{"vocab_size": null}'], ids=str)
def test_a_configuration_that_describes_no_model_is_refused(config: bytes) -> None:
    with pytest.raises(EngineError, match="does not describe a model"):
        EchoEngine(EchoCosts()).prepare(config)


def test_costs_are_slept_where_a_real_engine_would_work(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    engine = EchoEngine(EchoCosts(load_s=3.0, prefill_s_per_token=0.5, decode_s=0.125))
    engine.activate()
    sequence = a_sequence(prompt=(5, 6, 7, 8), output_tokens_max=3)
    engine.prefill(sequence, 3)
    assert answer(sequence, engine) == [5, 6, 7]
    resumed = a_sequence(prompt=(5, 6, 7, 8), output=(5,), output_tokens_max=3)
    assert answer(resumed, engine) == [5, 6, 7]
    assert slept == [3.0, 1.5, 0.5, 0.125, 0.125, 2.5, 0.125]


def test_what_was_computed_already_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a real engine: a round costs its own tokens, and a start what is left."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    engine = EchoEngine(EchoCosts(prefill_s_per_token=0.5, decode_s=0.125))
    sequence = a_sequence(prompt=(5, 6, 7, 8), output=(5, 6), output_tokens_max=3)
    for end in (4, 5, 5, 3):
        engine.prefill(sequence, end)
    assert answer(sequence, engine) == [5, 6, 7]
    assert slept == [2.0, 0.5, 0.125]


def test_it_never_imports_torch() -> None:
    code = (
        "import sys; import services.gpu_worker.__main__ as worker;"
        "from services.gpu_worker.config import EngineName, WorkerConfig;"
        "engine = worker.make_engine(WorkerConfig(server_id='s', engine=EngineName.ECHO)); engine.prewarm();"
        "import services.gpu_worker.service;"
        "assert engine.name == 'echo'; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'libs'}"}
    done = subprocess.run([sys.executable, "-c", code], env=paths, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
