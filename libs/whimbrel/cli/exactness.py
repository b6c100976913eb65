"""Owns how often an answer is, token by token, what it is when nobody disturbs it: real engines, a random token.

Two engines with the small demo model stand for two workers. Each prompt is answered greedily by the first one, and then
as a migration does it: the second engine computes the tokens in two rounds, as a destination does, and goes on from a
random one. Whether the model's next choice differs depends only on the last bits, in which many tokens at once and one
after another differ; how close the two best tokens were where the answers part says whether it was a tie.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import zip_longest
from math import inf
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file

from services.gpu_worker.core.resumptions import Resumption
from services.gpu_worker.core.sequence import Sequence
from services.gpu_worker.engines.engine import Precision
from services.gpu_worker.engines.transformers_engine import TransformersEngine
from services.gpu_worker.inference import PREFILL_TOKENS_MAX
from services.router.core.chat import ChatMessage
from services.router.texts import load_text
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.logprobs import unpack_logprob
from whimbrel.wire.messages import ResumeInference, Sampling, StartInference

SUBJECTS = (
    "a bird",
    "the sea",
    "a lighthouse",
    "winter",
    "a train",
    "the moon",
    "bread",
    "a river",
    "music",
    "a garden",
)
TASKS = (
    "Tell me a story about {}.",
    "Explain {} to a child.",
    "Write a poem about {}.",
    "What is the history of {}?",
    "Name three facts about {}.",
    "Why do people like {}?",
    "Describe {} in one sentence.",
    "Give me advice about {}.",
    "What would happen without {}?",
    "Write a letter to a friend about {}.",
)
OUTPUT_TOKENS = 48
# Rounds leave a gap of so many tokens at most, which is computed with the first one of the destination.
GAP_TOKENS_MAX = 8
# Two logits so close are a tie, which the last bits decide.
TIE_LOGITS = 1e-4
PRECISIONS = {"fp32": Precision.FLOAT32, "bf16": Precision.AUTO}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One prompt. `margin` is how far apart the two best logits were where the answers parted; 0 when they did not."""

    prompt: str
    moved_at: int
    tokens: int
    parted_at: int | None
    margin: float = 0.0

    @property
    def is_equal(self) -> bool:
        return self.parted_at is None

    @property
    def is_tie(self) -> bool:
        return not self.is_equal and self.margin < TIE_LOGITS


def prompts(count: int) -> list[str]:
    """The first so many of a hundred."""
    return [task.format(subject) for task in TASKS for subject in SUBJECTS][:count]


def compare(model: Path, precision: Precision, questions: Many[str], seed: int, console: Console) -> list[Compared]:
    """Blocking: some seconds for each question. Raises FileNotFoundError without the model."""
    chance = random.Random(seed)
    text = load_text(model.name, model)
    source, destination = _engine(model, precision), _engine(model, precision)
    compared = []
    for number, question in enumerate(questions):
        prompt = text.encode_chat((ChatMessage(role="user", content=question),))
        stops = text.settings.stop_tokens
        whole = _go_on(source, _sequence(prompt, (), stops))
        moved_at = chance.randint(1, max(1, len(whole) - 1))
        moved = _moved(destination, prompt, whole[:moved_at], stops, gap=chance.randint(1, GAP_TOKENS_MAX))
        pairs = enumerate(zip_longest(whole, moved))
        parted_at = next((at for at, (one, other) in pairs if one != other), None)
        margin = 0.0 if parted_at is None else _margin(source, prompt, whole[:parted_at], stops)
        one = Compared(prompt=question, moved_at=moved_at, tokens=len(whole), parted_at=parted_at, margin=margin)
        compared.append(one)
        said = "equal" if one.is_equal else f"parts at token {parted_at}, {margin:.2g} between the two best logits"
        console.print(f"{precision} {number + 1}: moved at token {moved_at}: {said}", style="dim", highlight=False)
    return compared


def _engine(model: Path, precision: Precision) -> TransformersEngine:
    engine = TransformersEngine(precision=precision, threads=1)
    engine.prepare((model / "config.json").read_bytes())
    dtype = torch.float32 if precision is Precision.FLOAT32 else torch.bfloat16
    engine.bind_views(load_file(model / "model.safetensors"), dtype)
    engine.activate()
    return engine


def _moved(
    engine: TransformersEngine, prompt: Many[int], output: Many[int], stops: tuple[int, ...], *, gap: int
) -> list[int]:
    """The answer that goes on after `output` where a migration brought it, in two rounds and a rest of `gap` tokens."""
    sequence = _sequence(prompt, output, stops)
    known = sequence.tokens
    for end in (len(prompt), max(len(prompt), len(known) - gap)):
        resumption = _resumption(sequence.request_id, known[:end])
        while resumption.is_due:
            reached = resumption.piece_end(PREFILL_TOKENS_MAX)
            engine.prefill(resumption, reached)
            resumption.computed = reached
    return _go_on(engine, sequence)


def _margin(engine: TransformersEngine, prompt: Many[int], output: Many[int], stops: tuple[int, ...]) -> float:
    """How far apart the two best logits are after `output`."""
    sequence = _sequence(prompt, output, stops, top_logprobs=2)
    decoded = engine.decode(sequence)
    engine.forget(sequence.request_id)
    if decoded.token is None:
        return inf  # the end of the answer, which comes without log probabilities
    (_, best), (_, second) = unpack_logprob(decoded.logprobs).top
    return best - second


def _go_on(engine: TransformersEngine, sequence: Sequence) -> list[int]:
    while not sequence.is_finished:
        sequence.advance(engine.decode(sequence).token, 0.0)
    engine.forget(sequence.request_id)
    return list(sequence.output)


def _sequence(
    prompt: Many[int], output: Many[int], stops: tuple[int, ...], *, top_logprobs: int | None = None
) -> Sequence:
    start = StartInference(
        request_id="one", epoch=1, router_id="none", router_epoch=1, instance_id="none", model_id="none",
        tokens=pack_tokens([*prompt, *output]), prompt_tokens=len(prompt), output_tokens_max=OUTPUT_TOKENS,
        stop_tokens=stops, sampling=Sampling(temperature=0.0), top_logprobs=top_logprobs,
    )  # fmt: skip
    return Sequence(start, 0.0)


def _resumption(request_id: str, tokens: list[int]) -> Resumption:
    message = ResumeInference(
        migration_id="none", instance_id="none", source_server_id="none", source_slot=0, request_id=request_id,
        position=0, tokens=b"",
    )  # fmt: skip
    resumption = Resumption(message, 0.0)
    resumption.tokens = tokens
    return resumption
