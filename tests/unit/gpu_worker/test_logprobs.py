"""Log probabilities in the worker: computed from the model's own logits, kept with their tokens, and said again."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from whimbrel.wire.codec import unpack_tokens
from whimbrel.wire.errors import InvalidRequest
from whimbrel.wire.logprobs import LOGPROB_MIN, TokenLogprob, pack_logprob, record_bytes, unpack_logprob
from whimbrel.wire.messages import Ack, FinishReason, ResendTokens, Sampling, TokenEntry

from services.gpu_worker.core import sequence as sequences
from services.gpu_worker.core.logprobs import token_logprobs
from services.gpu_worker.core.sequence import Sequence, check_request
from services.gpu_worker.engines.echo_engine import EchoCosts, EchoEngine, made_up_logits
from services.gpu_worker.engines.engine import Engine
from tests.unit.gpu_worker.builders import Lender, a_request, a_sequence
from tests.unit.gpu_worker.harness import a_worker, long_request
from tests.unit.gpu_worker.test_transformers_engine import NO_END, Models, an_engine, asked, loaded, reference
from tests.unit.gpu_worker.tiny_models import TinyModel


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def records_of(entry: TokenEntry, top: int) -> list[TokenLogprob]:
    size = record_bytes(top)
    assert len(entry.logprobs) == size * len(unpack_tokens(entry.tokens))
    return [unpack_logprob(entry.logprobs[begin : begin + size]) for begin in range(0, len(entry.logprobs), size)]


def test_a_record_comes_back_as_it_was_packed() -> None:
    said = TokenLogprob(-0.5, ((7, -0.25), (2**32 - 1, LOGPROB_MIN)))
    assert unpack_logprob(pack_logprob(*said)) == said
    assert unpack_logprob(pack_logprob(-1.0, ())) == TokenLogprob(-1.0, ())
    assert [record_bytes(top) for top in (0, 1, 20)] == [4, 12, 164]


def test_a_logprob_is_the_log_softmax_of_the_raw_logits() -> None:
    logits = floats(0.0, math.log(2), math.log(5))
    said = unpack_logprob(token_logprobs(logits, 0, 2))
    assert said.logprob == pytest.approx(math.log(1 / 8))
    assert [token for token, _ in said.top] == [2, 1]
    assert [logprob for _, logprob in said.top] == pytest.approx([math.log(5 / 8), math.log(2 / 8)])


def test_alternatives_are_the_best_first_and_ties_go_to_the_lower_id() -> None:
    logits = floats(1.0, 3.0, 1.0, 3.0, 1.0, 0.0)
    for top, ids in ((0, []), (1, [1]), (3, [1, 3, 0]), (6, [1, 3, 0, 2, 4, 5])):
        assert [token for token, _ in unpack_logprob(token_logprobs(logits, 5, top)).top] == ids


def test_what_a_model_rules_out_has_a_finite_logprob() -> None:
    """JSON has no infinity."""
    said = unpack_logprob(token_logprobs(floats(0.0, -math.inf), 1, 2))
    assert said == TokenLogprob(LOGPROB_MIN, ((0, 0.0), (1, LOGPROB_MIN)))


def test_large_logits_do_not_overflow() -> None:
    assert unpack_logprob(token_logprobs(floats(3e38, 0.0), 0, 1)) == TokenLogprob(0.0, ((0, 0.0),))


def test_tokens_come_with_their_logprobs_and_keep_them() -> None:
    sequence = a_sequence(top_logprobs=1, output_tokens_max=9)
    records = [pack_logprob(-number, [(number, -0.5)]) for number in range(3)]
    entries = [sequence.advance(40 + number, 1.0, record) for number, record in enumerate(records)]
    assert [entry.logprobs for entry in entries if entry] == records
    assert [sequence.entry(position).logprobs for position in range(4)] == [
        b"".join(records[position:]) for position in range(4)
    ]


def test_a_request_that_was_begun_elsewhere_has_the_logprobs_of_its_own_tokens() -> None:
    """D8: its router has those of the others, and asks for none of them."""
    sequence = a_sequence(output=(40, 41), top_logprobs=0, output_tokens_max=9)
    sequence.advance(42, 1.0, pack_logprob(-1.0, ()))
    sequence.advance(43, 1.0, pack_logprob(-2.0, ()))
    for position, expected in ((0, 2), (2, 2), (3, 3)):
        entry = sequence.entry(position)
        assert entry.position == expected
        assert [said.logprob for said in records_of(entry, 0)] == [-1.0, -2.0][expected - 2 :]


def test_an_entry_with_logprobs_is_no_longer_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "ENTRY_LOGPROBS_BYTES_MAX", 3 * record_bytes(2) + 5)
    sequence = a_sequence(top_logprobs=2, output_tokens_max=5)
    for token in range(5):
        sequence.advance(token, 1.0, pack_logprob(-token, [(1, -1.0), (2, -2.0)]))
    first, last = sequence.entry(0), sequence.entry(3)
    assert (unpack_tokens(first.tokens), first.finish_reason) == ([0, 1, 2], None)
    assert (unpack_tokens(last.tokens), last.finish_reason) == ([3, 4], FinishReason.LENGTH)
    assert [said.logprob for entry in (first, last) for said in records_of(entry, 2)] == [0.0, -1.0, -2.0, -3.0, -4.0]


async def test_what_is_too_long_for_an_entry_is_said_again_in_several(
    lender: Lender, model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequences, "ENTRY_LOGPROBS_BYTES_MAX", 6 * record_bytes(2))
    async with a_worker(lender, model) as outside:
        await outside.load()
        tokens = await outside.answer(long_request(top_logprobs=2))
        first = outside.entries()
        outside.heard.clear()
        assert isinstance(await outside.ask(ResendTokens(request_id="req-1", epoch=1, position=3)), Ack)
        again = outside.entries()
    assert [len(unpack_tokens(entry.tokens)) for entry in again] == [6, 6, 5]
    assert [entry.finish_reason for entry in again] == [None, None, FinishReason.STOP]
    assert b"".join(entry.logprobs for entry in again) == b"".join(entry.logprobs for entry in first[3:])
    assert len(tokens) == 20


def test_nothing_is_computed_and_nothing_travels_unless_it_is_asked_for() -> None:
    sequence = a_sequence(prompt=(5, 6, 7))
    decoded = an_echo().decode(sequence)
    assert decoded.logprobs == b""
    entry = sequence.advance(decoded.token, 1.0)
    assert entry is not None
    assert entry.logprobs == b""


def test_the_echo_makes_up_logits_in_which_it_says_the_most_probable() -> None:
    engine, sequence = an_echo(), a_sequence(prompt=(5, 6, 7), top_logprobs=3)
    first, second = (sequence.advance(*_step(engine, sequence)) for _ in range(2))
    assert first is not None
    assert second is not None
    (said,), (other,) = records_of(first, 3), records_of(second, 3)
    assert [token for token, _ in said.top] == [5, 6, 7]
    assert said.logprob == said.top[0][1] > said.top[1][1] > said.top[2][1]
    assert said.logprob != other.logprob, "each position has its own"
    assert first.logprobs == token_logprobs(made_up_logits(5, 0, 9), 5, 3)


def test_more_alternatives_than_there_are_tokens_are_refused() -> None:
    request = a_request(top_logprobs=10)
    check_request(request, context_tokens=99, vocabulary_size=10)
    with pytest.raises(InvalidRequest, match="top_logprobs: 10 alternatives are more than the model's vocabulary of 9"):
        check_request(request, context_tokens=99, vocabulary_size=9)


@pytest.mark.parametrize(
    "sampling", [NO_END, Sampling(temperature=1.5, seed=3, repetition_penalty=1.8)], ids=["greedy", "sampled"]
)
def test_logprobs_of_a_real_model_are_those_of_its_reference_whatever_the_sampling(
    lender: Lender, tiny_models: Models, sampling: Sampling
) -> None:
    """Penalties, bias and temperature do not show in them."""
    model = tiny_models["llama"]
    with loaded(an_engine(), lender, model) as engine:
        sequence = asked(sampling=sampling, top_logprobs=4)
        entries = []
        while not sequence.is_finished:
            entries.append(sequence.advance(*_step(engine, sequence)))
        engine.forget(sequence.request_id)
    with torch.inference_mode():
        logits = reference(model)(torch.tensor([sequence.tokens])).logits[0]
    expected = torch.log_softmax(logits.double(), dim=-1)
    for position, token in enumerate(sequence.output):
        row = expected[sequence.prompt_tokens + position - 1]
        (said,) = records_of(entries[position], 4)
        assert said.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [token for token, _ in said.top] == row.topk(4).indices.tolist()
        assert [logprob for _, logprob in said.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)


def test_a_real_model_that_goes_on_elsewhere_has_the_logprobs_of_the_undisturbed_run(
    lender: Lender, tiny_models: Models
) -> None:
    """D8: up to the last bits, in which prefill and decode differ."""
    with loaded(an_engine(), lender, tiny_models["llama"]) as engine:

        def rest(output: tuple[int, ...]) -> tuple[list[int], list[TokenLogprob]]:
            sequence = asked(output, sampling=NO_END, top_logprobs=3)
            while not sequence.is_finished:
                sequence.advance(*_step(engine, sequence))
            engine.forget(sequence.request_id)
            return list(sequence.output), records_of(sequence.entry(len(output)), 3)

        output, undisturbed = rest(())
        for position in range(1, len(output)):
            again, logprobs = rest(tuple(output[:position]))
            assert again == output
            for said, expected in zip(logprobs, undisturbed[position:], strict=True):
                assert said.logprob == pytest.approx(expected.logprob, abs=1e-4)
                assert [token for token, _ in said.top] == [token for token, _ in expected.top]


def an_echo() -> EchoEngine:
    engine = EchoEngine(EchoCosts())
    engine.prepare(b'{"vocab_size": 9}')
    return engine


def _step(engine: Engine, sequence: Sequence) -> tuple[int | None, float, bytes]:
    decoded = engine.decode(sequence)
    return decoded.token, 1.0, decoded.logprobs
