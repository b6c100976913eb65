"""Owns the real engine: transformers models in PyTorch, over weights that stay where the agent put them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache

from services.gpu_worker.core.logprobs import token_logprobs
from services.gpu_worker.core.sampling import choose_token
from services.gpu_worker.engines.engine import Decoded, EngineError, Known, Limits, PartitionMemory, Precision
from services.gpu_worker.engines.partition_tensors import partition_tensors
from services.gpu_worker.engines.prefixes import LastPrefix
from services.gpu_worker.engines.prewarming import prewarm
from services.gpu_worker.engines.skeletons import Skeleton, SkeletonCache
from services.gpu_worker.engines.spreading import Spread
from services.gpu_worker.engines.widening import Widening, is_widening

if TYPE_CHECKING:
    from ckptio import Index

    from services.gpu_worker.core.sequence import Sequence

_COMPUTABLE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TransformersEngine:
    """Runs any text generation model that transformers knows by its model type.

    `device` is the slot's: where it prewarms. A model is computed where its partitions are.
    """

    name = "transformers"

    def __init__(self, *, precision: Precision = Precision.AUTO, threads: int, device: str = "cpu") -> None:
        self._precision = precision
        self._threads = threads
        self._device = torch.device(device)
        self._cache = SkeletonCache(_adaptation(precision, self._device))
        self._skeleton: Skeleton | None = None
        self._spread: Spread | None = None
        self._dtype = torch.float32
        self._arguments: dict[str, Any] = {}
        self._kv_caches: dict[str, tuple[Known, DynamicCache]] = {}
        self._last_prefix = LastPrefix()

    def prewarm(self) -> None:
        prewarm(self, torch.float32 if self._precision is Precision.FLOAT32 else torch.bfloat16)

    def prepare(self, model_config: bytes) -> Limits:
        assert self._skeleton is None, "one model at a time"
        # The number of threads belongs to the thread that computes, so it is set there.
        torch.set_num_threads(self._threads)
        self._skeleton = self._cache.take(model_config)
        self._arguments = _arguments(self._skeleton.model)
        return self._skeleton.limits

    def bind(self, index: Index, memories: Many[PartitionMemory]) -> None:
        self.bind_views(partition_tensors(index, memories), self._choose_dtype(index))

    def bind_views(self, views: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Bind tensors by name, wherever they come from; the model will be computed in `dtype`."""
        assert self._skeleton is not None
        self._dtype = dtype
        self._skeleton.bind(views)
        self._close_spread()
        self._spread = Spread(self._skeleton.model)

    def random_views(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Random tensors, in the shapes of the prepared model."""
        assert self._skeleton is not None
        return {
            names[0]: torch.randn(places[0].meta.shape, dtype=dtype, device=self._device)
            for names, places in self._skeleton.tensors
        }

    def activate(self) -> None:
        assert self._skeleton is not None
        self._skeleton.convert(self._dtype, is_widening)

    def prefill(self, known: Known, end: int) -> None:
        _, cache = self._kv_caches.get(known.request_id, (known, None))
        if cache is None or cache.get_seq_length() < end:
            self._compute(known, end)

    def decode(self, sequence: Sequence) -> Decoded:
        logits = self._compute(sequence, len(sequence.tokens))
        token = choose_token(
            logits,
            sequence.request.sampling,
            prompt=sequence.tokens[: sequence.prompt_tokens],
            output=sequence.output,
            position=sequence.position,
        )
        if sequence.is_stop(token):
            return Decoded(None)
        top = sequence.request.top_logprobs
        return Decoded(token) if top is None else Decoded(token, token_logprobs(logits, token, top))

    def forget(self, request_id: str) -> None:
        known, cache = self._kv_caches.pop(request_id, (None, None))
        if known is not None and cache is not None:
            self._last_prefix.keep(known.tokens, cache)

    def unload(self) -> None:
        self._kv_caches.clear()
        self._last_prefix.clear()
        skeleton, self._skeleton = self._skeleton, None
        if skeleton is not None:
            self._close_spread()
            skeleton.unbind()
            self._cache.give_back(skeleton)

    def _close_spread(self) -> None:
        if self._spread is not None:
            self._spread.close()
            self._spread = None

    def _choose_dtype(self, index: Index) -> torch.dtype:
        """What most bytes of the checkpoint are, unless it is set. Raises EngineError for one nobody computes in."""
        match self._precision:
            case Precision.FLOAT32:
                return torch.float32
            case Precision.BFLOAT16:
                return torch.bfloat16
        sizes: Counter[str] = Counter()
        for dtype, size_bytes in zip(index.dtype, index.size_bytes, strict=True):
            if getattr(torch, dtype).is_floating_point:
                sizes[dtype] += size_bytes
        own = sizes.most_common(1)[0][0] if sizes else "float32"
        if own == "float64":
            return torch.float32
        if own not in _COMPUTABLE:
            raise EngineError(f"weights of dtype {own} cannot be computed with; convert the model to bfloat16")
        return _COMPUTABLE[own]

    def _kv_cache(self, known: Known, end: int) -> DynamicCache:
        """What was computed of these tokens already: for the request itself, or for the last one that began like it."""
        assert self._skeleton is not None
        _, cache = self._kv_caches.get(known.request_id, (known, None))
        if cache is None and known.may_share:
            cache = self._last_prefix.take(known.tokens[:end])
        return DynamicCache(config=self._skeleton.model.config) if cache is None else cache

    @torch.inference_mode()
    def _compute(self, known: Known, end: int) -> NDArray[np.float32]:
        """Run the tokens that the KV cache lacks; the logits after the last of them, shape (vocabulary size,)."""
        assert self._skeleton is not None
        assert self._spread is not None
        model = self._skeleton.model
        cache = self._kv_cache(known, end)
        # Of whoever computed last, because what was resumed for another worker may have been started here since.
        self._kv_caches[known.request_id] = known, cache
        tokens = known.tokens[cache.get_seq_length() : end]
        assert tokens, "a KV cache holds more than the tokens that are known"
        try:
            inputs = torch.tensor([tokens], device=self._spread.device)
            output = model(inputs, **{self._arguments["cache"]: cache}, **self._arguments["fixed"])
        except BaseException:
            # Some layers have seen these tokens and others have not: nobody may go on from this cache.
            del self._kv_caches[known.request_id]
            raise
        logits: NDArray[np.float32] = output.logits[0, -1].float().cpu().numpy()
        return logits


def has_narrow_instructions() -> bool:
    """Whether this processor multiplies bfloat16 matrices in hardware."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))


def _adaptation(precision: Precision, device: torch.device) -> Callable[[nn.Module], None]:
    """What makes a new skeleton ready for `precision` on this processor, or on a GPU, which needs nothing."""
    if device.type == "cuda":
        return lambda _: None
    if precision is Precision.FLOAT32:
        return Widening.make(is_exact=True).apply
    if precision is Precision.AUTO and not has_narrow_instructions():
        return Widening.make(is_exact=False).apply
    return lambda _: None


def _arguments(model: Any) -> dict[str, Any]:
    """What to pass to this model's forward besides the tokens; names differ between models and versions."""
    names = inspect.signature(type(model).forward).parameters
    fixed: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in names:
        # The logits of a whole prompt would be the largest tensor of all, and only the last ones are asked for.
        fixed["logits_to_keep"] = 1
    return {"cache": "cache" if "cache" in names else "past_key_values", "fixed": fixed}
