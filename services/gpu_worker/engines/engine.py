"""Owns what the worker expects of an engine, and the error by which one says that a model is not for it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from ckptio import DeviceBuffer, Index, Mapping

    from services.gpu_worker.core.sequence import Sequence

# The bytes of a partition: chunks mapped back to back, or memory of a GPU.
PartitionMemory: TypeAlias = "Mapping | DeviceBuffer"


class EngineError(Exception):
    """This model or this input cannot be computed; the text says why and what to do."""


class Precision(StrEnum):
    """In what models are computed.

    `AUTO`: the checkpoint's own dtype, whose bytes are used where they are; where the processor has no 16-bit matrix
    instructions, prefill is computed in float32 from the same bytes. `BFLOAT16`: torch's own, whatever it costs.
    `FLOAT32`: everything is computed in float32, from the same bytes too; slower, but greedy answers are the same
    however a request was split into prefill and decode.
    """

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a model can take."""

    context_tokens: int
    vocabulary_size: int


class Decoded(NamedTuple):
    """The next token, None when the output ends here; with its packed log probabilities, if the request wants them."""

    token: int | None
    logprobs: bytes = b""


class Known(Protocol):
    """The known tokens of a request, here or elsewhere; they only ever become more."""

    request_id: str
    tokens: list[int]

    @property
    def may_share(self) -> bool:
        """Whether its KV cache may begin with that of another request."""
        ...


class Engine(Protocol):
    """One model at a time. Every method but `name` is called in the engine's own thread, one after another.

    prepare → bind → activate → (prefill, decode, forget)* → unload; `unload` is allowed at any point, and twice. Before
    the first request, also after `activate`, `bind` may come again with other memory.
    """

    name: str

    def prewarm(self) -> None:
        """Pay every first-time cost now, before there is a request."""

    def prepare(self, model_config: bytes) -> Limits:
        """Build the skeleton of the model that config.json describes. Raises EngineError."""
        ...

    def bind(self, index: Index, memories: Many[PartitionMemory]) -> None:
        """Make the skeleton's tensors those of the partitions, touching no byte of them; no view of what was bound
        before is left. Raises EngineError."""

    def activate(self) -> None:
        """Every byte is in place now: do what has to read them before the first request."""

    def prefill(self, known: Known, end: int) -> None:
        """Fill the request's KV cache with its tokens up to index `end`, as far as they are not in it yet. Whoever has
        these tokens under the same request id afterwards goes on from there."""

    def decode(self, sequence: Sequence) -> Decoded:
        """Compute all tokens that are not in the KV cache yet, and choose the next."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop the KV cache of a request, if there is one."""

    def unload(self) -> None:
        """Drop the model; afterwards no view of the partitions is left."""
