"""Model directories for router tests: tiny tokenizers built on the spot, in the layout of the repository."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Paris is the capital of France.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "日本語のテキスト、日本、東京。 🙂😀👩‍👩‍👧 emoji",
] * 4

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_tokenizer() -> Tokenizer:
    """As GPT-2 and its descendants: every byte is a token, so characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """As Llama 2: words with a leading '▁', and bytes for what is not in the vocabulary."""
    letters = sorted({letter for line in CORPUS[:2] for letter in line.replace(" ", "▁")})
    bytes_of_fallback = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_of_fallback, *letters, "▁P", "ar", "is", "▁Par", "▁Paris"]
    merges = [("▁", "P"), ("a", "r"), ("i", "s"), ("▁P", "ar"), ("▁Par", "is")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_model(
    directory: Path,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = CHAT_TEMPLATE,
    eos_token: str = "<|im_end|>",
    context_tokens: int = 512,
    generation: dict[str, object] | None = None,
) -> None:
    """What the repository holds of a model besides its weights."""
    directory.mkdir(parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    eos_token_id = tokenizer.token_to_id(eos_token)
    settings = {"eos_token": eos_token, "tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(directory / "tokenizer_config.json", settings)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": context_tokens,
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_id": eos_token_id,
    }
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": eos_token_id, **(generation or {})})
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)
    (directory / "partition_0.bin").write_bytes(b"\0" * 4096)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))
