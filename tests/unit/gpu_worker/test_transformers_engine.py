"""The real engine on tiny random models: the same answers as transformers, from bytes that stay in the pool."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ckptio
import numpy as np
import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from whimbrel.wire.codec import pack_tokens
from whimbrel.wire.messages import ResumeInference, Sampling

from services.gpu_worker.chunks import LentChunks
from services.gpu_worker.core.resumptions import Resumption, Resumptions
from services.gpu_worker.core.sequence import Sequence, prefill_ends
from services.gpu_worker.engines.engine import EngineError, Precision
from services.gpu_worker.engines.prefixes import ANEW_TOKENS_MIN, PREFIX_TOKENS_MIN
from services.gpu_worker.engines.skeletons import SkeletonCache, build_skeleton
from services.gpu_worker.engines.transformers_engine import TransformersEngine
from tests.unit.gpu_worker.builders import Lender, a_sequence
from tests.unit.gpu_worker.tiny_models import CHUNK_BYTES, MODELS, VOCABULARY, TinyModel

PROMPT = (11, 42, 7, 99, 123, 5, 64, 31)
OUTPUT_TOKENS = 10
NO_END = Sampling(temperature=0.0, logit_bias={2: -1e9})

Models = dict[str, TinyModel]


@contextmanager
def loaded(engine: TransformersEngine, lender: Lender, model: TinyModel) -> Iterator[TransformersEngine]:
    chunks = LentChunks.take(lender.lend(model.checkpoint))
    engine.prepare(model.config)
    engine.bind(chunks.index, chunks.memories)
    engine.activate()
    yield engine
    engine.unload()
    chunks.close()


def an_engine(precision: Precision = Precision.FLOAT32) -> TransformersEngine:
    return TransformersEngine(precision=precision, threads=1)


def answer(engine: TransformersEngine, sequence: Sequence) -> list[int]:
    while not sequence.is_finished:
        sequence.advance(engine.decode(sequence).token, 0.0)
    engine.forget(sequence.request_id)
    return list(sequence.output)


def asked(output: tuple[int, ...] = (), **fields: Any) -> Sequence:
    return a_sequence(**({"prompt": PROMPT, "output": output, "output_tokens_max": OUTPUT_TOKENS} | fields))


def reference(model: TinyModel, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.source, dtype=dtype).eval()


def expected(model: TinyModel) -> list[int]:
    """What transformers generates greedily in float32; it is kept from ending early, as `NO_END` keeps the engine."""
    tokens = reference(model).generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=OUTPUT_TOKENS, min_new_tokens=OUTPUT_TOKENS, do_sample=False,
    )  # fmt: skip
    return [int(token) for token in tokens[0][len(PROMPT) :]]


@pytest.mark.parametrize("name", MODELS)
def test_no_pass_copies_the_largest_matrix_of_the_model(name: str, lender: Lender, tiny_models: Models) -> None:
    """Where only the last logits are wanted, torch did, for the strides of a view: most of a short prefill's time."""
    sequence = asked()
    with loaded(TransformersEngine(precision=Precision.BFLOAT16, threads=1), lender, tiny_models[name]) as engine:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
            engine.prefill(sequence, 3)
            engine.decode(sequence)
        largest = engine._skeleton.model.get_output_embeddings().weight.numel()  # type: ignore[union-attr]
        copied = [shape for event in seen.events() if event.name == "aten::copy_" for shape in event.input_shapes[:1]]
    assert copied
    assert max(np.prod(shape) for shape in copied) < largest


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_those_of_transformers(name: str, lender: Lender, tiny_models: Models) -> None:
    model = tiny_models[name]
    with loaded(an_engine(), lender, model) as engine:
        assert answer(engine, asked(sampling=NO_END)) == expected(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_bound_skeleton_has_the_logits_of_the_loaded_model(name: str, lender: Lender, tiny_models: Models) -> None:
    """F3: restoring is pointer arithmetic; computed buffers, such as rotary frequencies, must be there all the same."""
    model = tiny_models[name]
    skeleton = build_skeleton(model.config)
    chunks = LentChunks.take(lender.lend(model.checkpoint))
    skeleton.bind(ckptio.tensors(chunks.index, chunks.memories))
    with torch.inference_mode():
        ours = skeleton.model(torch.tensor([PROMPT])).logits
        theirs = reference(model, ours.dtype)(torch.tensor([PROMPT])).logits
    assert torch.equal(ours, theirs)
    assert not any(tensor.is_meta for tensor in skeleton.model.state_dict().values())
    assert not any(buffer.is_meta for buffer in skeleton.model.buffers())
    del ours, theirs
    skeleton.unbind()
    chunks.close()


@pytest.mark.parametrize("precision", [Precision.AUTO, Precision.BFLOAT16])
@pytest.mark.parametrize("name", ["llama-tied-bf16", "qwen2-bf16", "gpt2-bf16"])
def test_sixteen_bit_models_are_computed_nearly_as_in_float32(
    precision: Precision, name: str, lender: Lender, tiny_models: Models
) -> None:
    with loaded(an_engine(precision), lender, tiny_models[name]) as engine:
        near = engine._compute(asked(), len(PROMPT))
    exact = reference(tiny_models[name])(torch.tensor([PROMPT])).logits[0, -1].detach().numpy()
    assert np.corrcoef(near, exact)[0, 1] > 0.998
    assert int(near.argmax()) == int(exact.argmax())


def test_a_model_in_32_bits_can_be_computed_in_bfloat16(lender: Lender, tiny_models: Models) -> None:
    with loaded(an_engine(Precision.BFLOAT16), lender, tiny_models["llama"]) as engine:
        assert len(answer(engine, asked())) > 0


@pytest.mark.parametrize("begun", [1, 4, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_moves_here_goes_on_as_if_it_had_always_been_here(
    begun: int, temperature: float, lender: Lender, tiny_models: Models
) -> None:
    """`migration.md` section 3: greedy and sampled answers do not notice."""
    sampling = Sampling(temperature=temperature, seed=3, top_p=0.95, frequency_penalty=0.3, logit_bias={2: -1e9})
    with loaded(an_engine(), lender, tiny_models["llama-tied-bf16"]) as engine:
        whole = answer(engine, asked(sampling=sampling))
        assert answer(engine, asked(output=tuple(whole[:begun]), sampling=sampling)) == whole
    assert len(whole) == OUTPUT_TOKENS


def test_a_prefill_in_pieces_gives_the_same_answer(lender: Lender, tiny_models: Models) -> None:
    with loaded(an_engine(), lender, tiny_models["llama"]) as engine:
        whole = answer(engine, asked())
        sequence = asked()
        for end in prefill_ends(sequence, 3):
            engine.prefill(sequence, end)
        assert answer(engine, sequence) == whole


def test_a_stop_token_ends_the_answer_and_is_not_in_it(lender: Lender, tiny_models: Models) -> None:
    with loaded(an_engine(), lender, tiny_models["llama"]) as engine:
        whole = answer(engine, asked())
        stop = whole[3]
        sequence = asked(stop_tokens=(stop,))
        assert answer(engine, sequence) == whole[: whole.index(stop)]
        assert sequence.finish_reason == "stop"


def test_binding_touches_no_byte_so_it_can_be_done_while_they_are_on_their_way(
    lender: Lender, tiny_models: Models
) -> None:
    """L6: the model is bound while bytes move; only activation may read them."""
    model = tiny_models["llama-tied-bf16"]
    attach = lender.lend(model.checkpoint)
    whole = [bytes(lender.pool.chunk(number)) for number in range(len(attach.partitions[0].chunks) // 4)]
    for number in range(len(whole)):
        lender.pool.chunk(number)[:] = bytes(len(whole[number]))
    chunks = LentChunks.take(attach)
    engine = an_engine()
    engine.prepare(model.config)
    engine.bind(chunks.index, chunks.memories)
    for number, content in enumerate(whole):
        lender.pool.chunk(number)[:] = content
    engine.activate()
    assert answer(engine, asked(sampling=NO_END)) == expected(model)
    engine.unload()
    chunks.close()


@pytest.mark.parametrize("precision", [Precision.AUTO, Precision.FLOAT32])
def test_weights_are_computed_with_where_they_are(precision: Precision, lender: Lender, tiny_models: Models) -> None:
    """Zero copy: every matrix of a 16-bit model lies in the mapping, whatever it is computed in; tied ones are one."""
    with loaded(an_engine(precision), lender, tiny_models["llama-tied-bf16"]) as engine:
        assert engine._skeleton is not None
        model = engine._skeleton.model
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        assert {parameter.dtype for parameter in matrices} == {torch.bfloat16}
        assert len({parameter.untyped_storage().data_ptr() for parameter in matrices}) == 1
        assert model.lm_head.weight is model.model.embed_tokens.weight
        del model, matrices


def test_swapping_models_ten_times_keeps_nothing_and_collects_no_garbage(lender: Lender, tiny_models: Models) -> None:
    """L11: weights never change, so unloading is letting go; a view that stayed would keep the chunks lent for ever."""
    engine = an_engine(Precision.AUTO)
    process = psutil.Process()
    resident_bytes = []
    gc.disable()
    try:
        for name in ["llama-tied-bf16", "opt"] * 10:
            with loaded(engine, lender, tiny_models[name]):
                answer(engine, asked())
            lender.pool.free(range(lender.pool.chunk_count - lender.pool.free_chunks))
            resident_bytes.append(process.memory_info().rss)
    finally:
        gc.enable()
    growth_bytes = resident_bytes[-1] - resident_bytes[3]
    assert growth_bytes < 4 * 1024 * 1024, f"{growth_bytes} bytes in 16 swaps"


def test_a_skeleton_is_kept_for_the_next_time_and_the_oldest_goes(tiny_models: Models) -> None:
    adapted = []
    cache = SkeletonCache(adapted.append, skeletons_max=2)
    configs = [tiny_models[name].config for name in ("llama", "opt", "qwen2-bf16")]
    first = cache.take(configs[0])
    cache.give_back(first)
    assert cache.take(configs[0]) is first
    for skeleton in [first, *(cache.take(config) for config in configs[1:])]:
        cache.give_back(skeleton)
    assert len(cache) == 2
    assert cache.take(configs[0]) is not first
    assert len(adapted) == 4


def test_unloading_is_allowed_at_any_point_and_twice(lender: Lender, tiny_models: Models) -> None:
    engine = an_engine()
    engine.unload()
    engine.prepare(tiny_models["llama"].config)
    engine.unload()
    chunks = LentChunks.take(lender.lend(tiny_models["llama"].checkpoint))
    engine.prepare(tiny_models["llama"].config)
    engine.bind(chunks.index, chunks.memories)
    engine.unload()
    engine.unload()
    chunks.close()  # raises while a view of the weights is alive
    assert all(mapping.is_closed for mapping in chunks.memories)


def test_a_checkpoint_of_another_model_is_refused_and_leaves_nothing_bound(lender: Lender, tiny_models: Models) -> None:
    engine = an_engine()
    chunks = LentChunks.take(lender.lend(tiny_models["opt"].checkpoint))
    engine.prepare(tiny_models["llama"].config)
    with pytest.raises(EngineError, match=r"'model.embed_tokens.weight' of the model is not in the checkpoint"):
        engine.bind(chunks.index, chunks.memories)
    engine.unload()
    chunks.close()


def test_a_tensor_of_another_shape_is_refused_by_name(lender: Lender, tiny_models: Models) -> None:
    engine = an_engine()
    fields = json.loads(tiny_models["llama"].config) | {"intermediate_size": 80}
    chunks = LentChunks.take(lender.lend(tiny_models["llama"].checkpoint))
    engine.prepare(json.dumps(fields).encode())
    with pytest.raises(EngineError, match=r"gate_proj.*has the shape \[96, 64\], the model needs \[80, 64\]"):
        engine.bind(chunks.index, chunks.memories)
    engine.unload()
    chunks.close()


def test_weights_that_nobody_computes_with_are_refused(lender: Lender, tmp_path: Path, tiny_models: Models) -> None:
    ckptio.save({"w": torch.zeros(64, dtype=torch.float8_e4m3fn)}, tmp_path / "fp8", chunk_size_bytes=CHUNK_BYTES)
    chunks = LentChunks.take(lender.lend(tmp_path / "fp8"))
    engine = an_engine(Precision.AUTO)
    engine.prepare(tiny_models["llama"].config)
    with pytest.raises(EngineError, match="float8_e4m3fn cannot be computed with"):
        engine.bind(chunks.index, chunks.memories)
    engine.unload()
    chunks.close()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (b"{", "no model configuration"),
        (b"[]", "no model configuration"),
        (b"{}", "no model configuration: KeyError"),
        (b'{"model_type": "no-such-model"}', "model type 'no-such-model' is not supported"),
        (b'{"model_type": "vit"}', "model type 'vit' is not supported"),
        (b'{"model_type": "llama", "quantization_config": {"bits": 4}}', "original precision"),
        (b'{"model_type": "llama", "hidden_size": "wide"}', "'llama'"),
        (b'{"model_type": "llama", "num_attention_heads": 0}', "'llama'"),
    ],
    ids=str,
)
def test_a_configuration_that_makes_no_model_is_an_error_that_says_why(config: bytes, text: str) -> None:
    with pytest.raises(EngineError, match=text):
        build_skeleton(config)


def test_code_that_a_checkpoint_brings_is_never_run(tiny_models: Models) -> None:
    fields = json.loads(tiny_models["llama"].config) | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    assert build_skeleton(json.dumps(fields).encode()).limits.vocabulary_size == VOCABULARY


def test_a_prewarmed_engine_holds_no_model(lender: Lender, tiny_models: Models) -> None:
    for precision in Precision:
        engine = an_engine(precision)
        engine.prewarm()
        with loaded(engine, lender, tiny_models["llama"]):
            assert len(answer(engine, asked())) > 0


@pytest.mark.parametrize("shared", [0, PREFIX_TOKENS_MIN, 20, 40], ids=lambda n: f"{n} shared tokens")
def test_a_request_that_begins_like_the_last_one_gets_the_same_answer_as_without(
    shared: int, lender: Lender, tiny_models: Models
) -> None:
    """What was computed for a common prefix is used again, and nobody can tell from the answer."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    first = [chance.randrange(3, VOCABULARY) for _ in range(40)]
    second = [*first[:shared], *(chance.randrange(3, VOCABULARY) for _ in range(41 - shared))]
    answers = []
    for prompts in ([second], [first, second]):
        with loaded(an_engine(), lender, tiny_models["llama"]) as engine:
            answers.append([answer(engine, asked(prompt=prompt, sampling=NO_END)) for prompt in prompts][-1])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("shared", "anew"), [(20, 10), (29, ANEW_TOKENS_MIN), (5, 30)])
def test_only_the_tokens_that_differ_and_the_last_few_are_prefilled(
    shared: int, anew: int, lender: Lender, tiny_models: Models
) -> None:
    with loaded(an_engine(), lender, tiny_models["llama"]) as engine:
        prompt = list(range(10, 40))
        answer(engine, asked(prompt=prompt, sampling=NO_END))
        assert engine._skeleton is not None
        lengths: list[int] = []
        engine._skeleton.model.register_forward_pre_hook(lambda _, arguments: lengths.append(arguments[0].shape[1]))
        answer(engine, asked(prompt=[*prompt[:shared], *range(50, 80 - shared)], sampling=NO_END))
        assert lengths == [anew] + [1] * (OUTPUT_TOKENS - 1)


def test_a_seeded_sample_is_computed_from_its_request_alone(lender: Lender, tiny_models: Models) -> None:
    sampling = Sampling(temperature=1.0, seed=7)
    with loaded(an_engine(), lender, tiny_models["llama"]) as engine:
        prompt = list(range(10, 40))
        answer(engine, asked(prompt=prompt, sampling=NO_END))
        assert engine._skeleton is not None
        lengths: list[int] = []
        engine._skeleton.model.register_forward_pre_hook(lambda _, arguments: lengths.append(arguments[0].shape[1]))
        answer(engine, asked(prompt=prompt, sampling=sampling))
        assert lengths[0] == len(prompt)


def test_what_a_failed_pass_has_half_computed_is_never_used(lender: Lender, tiny_models: Models) -> None:
    prompt, other = (*range(10, 25), *range(50, 65)), range(10, 40)
    with loaded(an_engine(), lender, tiny_models["llama"]) as engine:
        whole, _ = [answer(engine, asked(prompt=tokens)) for tokens in (prompt, other)]
        assert engine._skeleton is not None

        def fail(*_: object) -> None:
            raise RuntimeError("out of memory")

        # In the second layer, when the first has its new keys and values already.
        hook = engine._skeleton.model.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.decode(asked(prompt=prompt))
        engine.forget("req-1")
        hook.remove()
        assert answer(engine, asked(prompt=prompt)) == whole


def test_a_prefix_is_not_carried_over_to_another_model(lender: Lender, tiny_models: Models) -> None:
    engine = an_engine()
    for name in ("llama", "opt", "llama"):
        with loaded(engine, lender, tiny_models[name]):
            assert answer(engine, asked(sampling=NO_END)) == expected(tiny_models[name])


def resumption_of(tokens: tuple[int, ...]) -> Resumption:
    message = ResumeInference(
        migration_id="m1",
        instance_id="inst-1",
        source_server_id="server-1",
        source_slot=3,
        request_id="req-1",
        position=0,
        tokens=pack_tokens(tokens),
    )
    resumptions = Resumptions()
    resumptions.hear(message, 0.0)
    resumption = resumptions.next()
    assert resumption is not None
    return resumption


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_goes_on_from_what_was_computed_while_it_ran_elsewhere(
    temperature: float, lender: Lender, tiny_models: Models
) -> None:
    """G6: its tokens go through the model once, and nothing that was computed for others comes into it."""
    prompt = tuple(range(10, 40))
    sampling = Sampling(temperature=temperature, seed=3, logit_bias={2: -1e9})
    with loaded(an_engine(), lender, tiny_models["llama"]) as engine:
        whole = answer(engine, asked(prompt=prompt, sampling=sampling))
        assert engine._skeleton is not None
        lengths: list[int] = []
        engine._skeleton.model.register_forward_pre_hook(lambda _, arguments: lengths.append(arguments[0].shape[1]))
        resumption = resumption_of((*prompt, *whole[:3]))
        for end in (16, 20, 32):
            engine.prefill(resumption, end)
        sequence = asked(prompt=prompt, output=tuple(whole[:4]), sampling=sampling)
        # What is there already costs nothing.
        engine.prefill(sequence, 20)
        assert answer(engine, sequence) == whole
        assert lengths == [16, 4, 12, 2, *[1] * 5]
        assert engine._kv_caches == {}
