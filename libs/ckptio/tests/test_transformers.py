"""Models of transformers from converted and from stock checkpoints: the same weights, the same logits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import ckptio
from ckptio.errors import ModelMismatch
from ckptio.partitioning import by_tensor_parallel
from ckptio.transformers import load_model

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def a_llama(tied: bool = True, **fields: Any) -> Any:
    config = transformers.LlamaConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=tied, **fields
    )
    return transformers.LlamaForCausalLM(config)


def a_qwen2() -> Any:
    config = transformers.Qwen2Config(**SMALL, intermediate_size=48, num_key_value_heads=2, rope_theta=5e5)
    return transformers.Qwen2ForCausalLM(config)


def a_gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    )


def an_opt() -> Any:
    return transformers.OPTForCausalLM(transformers.OPTConfig(**SMALL, ffn_dim=48, word_embed_proj_dim=32))


def a_mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, num_local_experts=2
    )
    return transformers.MixtralForCausalLM(config)


def a_neox() -> Any:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SMALL, intermediate_size=48))


@pytest.fixture
def published(tmp_path: Path) -> Callable[..., Path]:
    """Writer of a model as it is published, every floating buffer and weight random."""

    def write(model: Any, dtype: torch.dtype = torch.float32, shard_bytes: int = 10**9) -> Path:
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.2)
        model.generation_config.max_new_tokens = 17
        model.to(dtype).save_pretrained(tmp_path / "m", max_shard_size=shard_bytes)
        return tmp_path / "m"

    return write


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.arange(20).reshape(2, 10)).logits
    return result


def assert_same_model(model: Any, expected: Any) -> None:
    """Weights bit for bit. Logits nearly: where a matrix lies in memory decides how its sums are ordered."""
    theirs = expected.state_dict()
    ours = model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    torch.testing.assert_close(logits(model), logits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("build", [a_llama, a_qwen2, a_gpt2, an_opt])
def test_logits_are_those_of_from_pretrained(
    build: Callable, dtype: torch.dtype, published: Callable, tmp_path: Path
) -> None:
    """F7: converted, and stock as published in one file."""
    path = published(build(), dtype)
    expected = transformers.AutoModelForCausalLM.from_pretrained(path)
    ckptio.convert(path, tmp_path / "c", chunk_size_bytes=8192)
    for directory in (path, tmp_path / "c"):
        model = load_model(directory)
        assert type(model) is type(expected)
        assert not model.training
        assert model.dtype == expected.dtype == dtype
        assert_same_model(model, expected)
        assert model.generation_config.to_dict() == expected.generation_config.to_dict()
        theirs = dict(expected.named_buffers())
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, theirs[name]), name
        assert [p.requires_grad for p in model.parameters()] == [
            p.requires_grad for p in expected.parameters()
        ]


def test_parameters_are_the_loaded_bytes_and_ties_are_kept(published: Callable, tmp_path: Path) -> None:
    """L8: one storage for the partition means that no tensor was copied."""
    ckptio.convert(published(a_llama()), tmp_path / "c")
    model = load_model(tmp_path / "c", device_map={"": "cpu"})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert len({parameter.untyped_storage().data_ptr() for parameter in model.parameters()}) == 1
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_sharded_untied_and_generating(published: Callable, tmp_path: Path) -> None:
    path = published(a_llama(tied=False), shard_bytes=20_000)
    assert len(list(path.glob("*.safetensors"))) > 1
    expected = transformers.AutoModelForCausalLM.from_pretrained(path)
    model = load_model(path, device_map="cpu")
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    prompt = torch.tensor([[5, 6, 7]])
    got, wanted = (m.generate(prompt, do_sample=False, pad_token_id=0) for m in (model, expected))
    assert got.shape == (1, 20)
    assert torch.equal(got, wanted)


def test_a_tie_that_the_checkpoint_contradicts_is_undone(published: Callable, tmp_path: Path) -> None:
    state = a_llama(tied=False).state_dict()
    path = published(a_llama(tied=True))
    (path / "model.safetensors").unlink()
    ckptio.save(state, tmp_path / "s")
    ckptio.export(tmp_path / "s", tmp_path / "e")
    (tmp_path / "e" / "model.safetensors").rename(path / "model.safetensors")
    model = load_model(path)
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, state["model.embed_tokens.weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16"])
def test_another_dtype_is_that_of_from_pretrained(dtype: Any, published: Callable) -> None:
    path = published(a_llama())
    model = load_model(path, dtype=dtype)
    expected = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    assert model.dtype == expected.dtype
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same_model(model, expected)


@pytest.mark.parametrize("build", [a_mixtral, a_neox])
def test_a_model_that_transformers_puts_together_otherwise_is_put_together(
    build: Callable, published: Callable, tmp_path: Path
) -> None:
    """Published with a tensor per expert, or under old names, and fused or renamed by this transformers."""
    path = published(build())
    expected = transformers.AutoModelForCausalLM.from_pretrained(path)
    ckptio.convert(path, tmp_path / "c")
    for directory in (path, tmp_path / "c"):
        model = load_model(directory)
        assert not model.training
        assert_same_model(model, expected)
    state = ckptio.load(path)
    lost = next(name for name in state if "layers.1" in name and "norm" in name)
    del state[lost]
    ckptio.save(state, tmp_path / "s")
    (tmp_path / "s" / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(ModelMismatch) as caught:
        load_model(tmp_path / "s")
    assert caught.value.missing == (lost,)


def test_a_class_can_be_chosen(published: Callable) -> None:
    path = published(a_llama(tied=False))
    expected = transformers.AutoModel.from_pretrained(path)
    for kind in (transformers.LlamaModel, transformers.AutoModel):
        model = load_model(path, model_class=kind)
        assert type(model) is transformers.LlamaModel
        with torch.inference_mode():
            ids = torch.arange(10)[None]
            assert torch.equal(model(ids).last_hidden_state, expected(ids).last_hidden_state)
    causal = load_model(path, model_class=transformers.AutoModelForCausalLM)
    assert type(causal) is transformers.LlamaForCausalLM
    with pytest.raises(
        ckptio.UnsupportedFormat, match="AutoModelForMaskGeneration has no model of type 'llama'"
    ):
        load_model(path, model_class=transformers.AutoModelForMaskGeneration)


def test_missing_unexpected_and_misshapen_tensors_are_all_named(published: Callable, tmp_path: Path) -> None:
    path = published(a_llama())
    state = ckptio.load(path)
    del state["model.norm.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = torch.zeros(3, 3)
    state["model.layers.7.new"] = torch.zeros(3)
    ckptio.save(state, tmp_path / "s")
    (tmp_path / "s" / "config.json").write_bytes((path / "config.json").read_bytes())
    with pytest.raises(ModelMismatch) as caught:
        load_model(tmp_path / "s")
    assert caught.value.missing == ("model.norm.weight",)
    assert caught.value.unexpected == ("model.layers.7.new",)
    assert caught.value.misshapen == ("model.layers.0.mlp.up_proj.weight",)
    assert caught.value.path == tmp_path / "s"
    for words in (
        "missing (1): model.norm.weight",
        "unexpected (1): model.layers.7.new",
        "another shape (1)",
    ):
        assert words in str(caught.value)


def test_a_model_spread_over_partitions_is_put_on_their_device(published: Callable, tmp_path: Path) -> None:
    path = published(a_llama())
    ckptio.convert(path, tmp_path / "c", partition_of=lambda name: int("layers.1" in name))
    devices = {"model.layers.0": "cpu", "model": "cpu", "lm_head": "cpu"}
    model = load_model(tmp_path / "c", device_map=devices)
    assert_same_model(model, transformers.AutoModelForCausalLM.from_pretrained(path))
    with pytest.raises(ValueError, match="no device for model"):
        load_model(tmp_path / "c", device_map={"model.layers": "cpu"})


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_split_over_gpus_is_put_together_again(
    tied: bool, published: Callable, tmp_path: Path
) -> None:
    """F2: parts of one tensor in several partitions, by the tensor-parallel plan of the model."""
    path = published(a_llama(tied=tied))
    plan = dict(transformers.LlamaConfig.base_model_tp_plan) | {
        "lm_head": "colwise",
        "embed_tokens": "colwise",
    }
    ckptio.convert(path, tmp_path / "c", partitioning=by_tensor_parallel(plan, 2))
    assert any(name.endswith("#1") for name in ckptio.read_index(tmp_path / "c"))
    model = load_model(tmp_path / "c")
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert_same_model(model, transformers.AutoModelForCausalLM.from_pretrained(path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{}", "no configuration of a model"),
        (b'{"model_type": "nothing_like_it"}', "no configuration of a model"),
        (b'{"model_type": "llama", "architectures": ["pipeline"]}', "'pipeline' is unknown here"),
        (b'{"model_type": "llama"}', "names no architecture"),
        (
            b'{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 0}',
            "model",
        ),
    ],
)
def test_a_config_that_makes_no_model_is_refused(text: bytes, reason: str, published: Callable) -> None:
    path = published(a_llama())
    (path / "config.json").write_bytes(text)
    with pytest.raises(ckptio.UnsupportedFormat, match=reason) as caught:
        load_model(path)
    assert caught.value.path == path / "config.json"


@pytest.mark.parametrize("text", [b"", b"<html>", b"[1]"])
def test_a_config_that_is_no_object_is_corrupt(text: bytes, published: Callable) -> None:
    path = published(a_llama())
    (path / "config.json").write_bytes(text)
    with pytest.raises(ckptio.CorruptCheckpoint) as caught:
        load_model(path)
    assert caught.value.path == path / "config.json"


def test_a_quantized_config_is_refused(published: Callable) -> None:
    path = published(a_llama())
    fields = json.loads((path / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "fp8"}
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ckptio.UnsupportedFormat, match="quantized"):
        load_model(path)


def test_a_config_that_is_not_what_was_written_is_found(published: Callable, tmp_path: Path) -> None:
    """F7: a flipped bit in a file that the model is built from."""
    ckptio.convert(published(a_llama()), tmp_path / "c")
    raw = bytearray((tmp_path / "c" / "config.json").read_bytes())
    raw[-20] ^= 1
    (tmp_path / "c" / "config.json").write_bytes(raw)
    with pytest.raises(ckptio.CorruptCheckpoint, match=r"config\.json.*digest"):
        load_model(tmp_path / "c")
    (tmp_path / "c" / "config.json").unlink()
    with pytest.raises(ckptio.MissingFile, match=r"config\.json"):
        load_model(tmp_path / "c")


def test_what_is_no_model_says_so(a_checkpoint: Callable, tmp_path: Path) -> None:
    ckptio.save({"w": torch.ones(2)}, tmp_path / "s")
    with pytest.raises(ckptio.UnsupportedFormat, match=r"no config\.json here"):
        load_model(tmp_path / "s")


def unreadable(published: Callable, tmp_path: Path, **fields: Any) -> Path:
    """A converted model of which reading any weight fails."""
    path = tmp_path / "unreadable"
    ckptio.convert(published(a_llama(**fields)), path)
    raw = (path / "partition_0.bin").read_bytes()
    (path / "partition_0.bin").write_bytes(bytes(byte ^ 1 for byte in raw))
    with pytest.raises(ckptio.CorruptCheckpoint, match="partition_0"):
        load_model(path)
    return path


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"dtype": "nope"}, ValueError, "dtype 'nope': a model can have float16, bfloat16"),
        ({"dtype": "torch.nope"}, ValueError, "dtype 'torch.nope': a model can have"),
        ({"dtype": "int8"}, ValueError, "dtype 'int8': a model can have"),
        ({"dtype": torch.int64}, ValueError, "a model can have"),
        ({"dtype": "nn"}, ValueError, "dtype 'nn': a model can have"),
        ({"dtype": 16}, ValueError, "dtype 16: a model can have"),
        ({"model_class": "NoSuchModel"}, ValueError, r"'NoSuchModel': transformers .* has no such class"),
        ({"model_class": "LlamaConfig"}, TypeError, "LlamaConfig.*a model class of transformers"),
        ({"model_class": transformers.LlamaConfig}, TypeError, "LlamaConfig.*a model class of transformers"),
        ({"model_class": 3}, TypeError, "model_class 3: a model class"),
        ({"device_map": "disk"}, ValueError, "ckptio offloads nothing"),
        ({"device_map": {"": "cpu", "lm_head": "disk"}}, ValueError, "ckptio offloads nothing"),
        ({"device_map": "nope"}, ValueError, "device 'nope' is none of torch's"),
        ({"device_map": {"": "nope"}}, ValueError, "device 'nope' is none of torch's"),
        ({"device_map": {"": ["cpu"]}}, TypeError, "a name such as"),
        ({"device_map": {}}, ValueError, r"no device for model\.embed_tokens\.weight, .* and 19 more"),
        ({"device_map": {"model": "cpu"}}, ValueError, "no device for lm_head.weight$"),
        ({"device_map": {"lm_head": "cpu", "model.layers": "cpu"}}, ValueError, "no device for model.embed"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_before_any_weight_is_read(
    options: dict, kind: type[Exception], reason: str, published: Callable, tmp_path: Path
) -> None:
    path = unreadable(published, tmp_path, tied=False)
    with pytest.raises(kind, match=reason):
        load_model(path, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device_map", ["cuda", 0, {"": 0}, {"": "cpu", "model.layers.1": "cuda:1"}], ids=str)
def test_a_gpu_that_is_not_there_is_refused_before_any_weight_is_read(
    device_map: Any, published: Callable, tmp_path: Path
) -> None:
    with pytest.raises(ckptio.DeviceError, match="use of cuda"):
        load_model(unreadable(published, tmp_path), device_map)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_the_maps_that_transformers_makes_are_made(
    device_map: str, published: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By accelerate, for the memory that there is; where it would offload to disk, nothing is read."""
    path = published(a_llama())
    expected = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert_same_model(load_model(path, device_map=device_map), expected)
    monkeypatch.setattr("accelerate.utils.modeling.get_max_memory", lambda _=None: {"cpu": 20_000})
    with pytest.raises(ValueError, match=f"'{device_map}': no memory is left for .*offloads nothing"):
        load_model(unreadable(published, tmp_path), device_map=device_map)


def test_accelerate_is_asked_for_before_any_weight_is_read(
    published: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unreadable(published, tmp_path)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for device_map in ("auto", {"": "cpu", "lm_head": "meta"}):
        with pytest.raises(ckptio.errors.PackageMissing, match=r"needs accelerate.*pip install accelerate"):
            load_model(path, device_map)


@pytest.mark.parametrize("dtype", ["auto", None])
def test_the_stored_dtype_is_kept(dtype: Any, published: Callable) -> None:
    assert load_model(published(a_llama(), torch.bfloat16), dtype=dtype).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["torch.float16", "half", "float16", torch.float16], ids=str)
def test_a_dtype_has_every_name_that_torch_gives_it(dtype: Any, published: Callable) -> None:
    assert load_model(published(a_llama()), dtype=dtype).dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "kind"),
    [("LlamaModel", transformers.LlamaModel), ("AutoModelForCausalLM", transformers.LlamaForCausalLM)],
)
def test_a_class_can_be_chosen_by_name(name: str, kind: type, published: Callable) -> None:
    assert type(load_model(published(a_llama()), model_class=name)) is kind


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_its_packages_the_module_says_what_to_install(package: str) -> None:
    script = f"""
import sys
sys.modules[{package!r}] = None  # any import of it fails
import ckptio
for use in (lambda: ckptio.transformers, lambda: __import__("ckptio.transformers")):
    try:
        use()
    except ckptio.CkptioError as error:
        print(isinstance(error, ImportError), error)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True)
    line = f"True ckptio.transformers needs {package}; install it with: pip install 'ckptio[transformers]'\n"
    assert (done.stdout, done.stderr) == (line * 2, "")
