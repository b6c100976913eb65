"""Which files of a published model an import needs."""

from __future__ import annotations

import pytest

from services.storage_agent.import_files import needed_files, shards_of

SMALL = [
    "config.json",
    "generation_config.json",
    "merges.txt",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
]
USELESS = [
    "README.md",
    "LICENSE",
    "logo.png",
    "model.gguf",
    "onnx/model.onnx",
    "original/config.json",
    ".gitattributes",
]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("weights", "needed"),
    [
        (["model.safetensors", "pytorch_model.bin", "tf_model.h5"], ["model.safetensors"]),
        (["model.safetensors", "model.fp16.safetensors"], ["model.safetensors"]),
        (
            [*SHARDS, "model.safetensors.index.json", "consolidated.safetensors", "pytorch_model.bin.index.json"],
            [*SHARDS, "model.safetensors.index.json"],
        ),
        (SHARDS, SHARDS),
        (["weights.safetensors"], ["weights.safetensors"]),
        (["pytorch_model.bin", "training_args.bin", "optimizer.pt"], ["pytorch_model.bin"]),
        (
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
            ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"],
        ),
        (["consolidated.00.pth"], []),
        ([], []),
    ],
    ids=["one file", "variants", "shards", "no index", "own name", "torch", "torch shards", "another's", "none"],
)
def test_the_weights_of_one_format_and_all_small_files_are_needed(weights: list[str], needed: list[str]) -> None:
    assert needed_files([*USELESS, *weights, *SMALL]) == sorted([*needed, *SMALL])


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b"{",
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": "../x.safetensors"}}',
        b'{"weight_map": {"a": ".x.safetensors"}}',
        b'{"weight_map": {"a": "run.sh"}}',
    ],
)
def test_an_index_that_names_no_weights_beside_it_is_refused(index: bytes) -> None:
    with pytest.raises(ValueError):
        shards_of(index)


def test_the_shards_of_an_index_are_named_once() -> None:
    assert shards_of(b'{"weight_map": {"a": "y.safetensors", "b": "x.safetensors", "c": "y.safetensors"}}') == [
        "x.safetensors",
        "y.safetensors",
    ]
