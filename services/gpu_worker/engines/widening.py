"""Owns layers that compute in float32 with 16-bit weights, for processors without 16-bit matrix instructions.

There, torch multiplies 16-bit matrices at a seventh of the speed of float32. So a pass over many tokens (prefill)
widens weights block by block into a small scratch buffer, which stays in the processor's cache, and multiplies in
float32. Weights stay where they are, shared and in half the memory, and nothing is converted when a model is loaded.
A pass over one or two tokens (decode) is bound by memory instead, and fastest by torch's own 16-bit product of matrix
and vector; only where exactness matters more (`Precision.FLOAT32`) is it widened too, at the speed of float32 weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

# Where widening begins to pay: two rows cost twice one row, widening about three times (measured, 576 × 1536).
NARROW_ROWS_MAX = 2
# 8 MiB of float32: a part of any server's last-level cache, and whole layers of small models.
SCRATCH_ELEMENTS = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Widening:
    """How layers widen; all share `scratch` (flat, float32).

    `is_exact` means float32 throughout, from the embedding on; otherwise activations keep the weights' dtype, and up
    to two rows are not widened.
    """

    scratch: Tensor
    is_exact: bool

    @classmethod
    def make(cls, *, is_exact: bool) -> Widening:
        return cls(scratch=torch.empty(SCRATCH_ELEMENTS, dtype=torch.float32), is_exact=is_exact)

    def apply(self, model: nn.Module) -> None:
        """Turn every plain linear layer, and for exactness every plain embedding, of `model` into a widening one."""
        for module in model.modules():
            # A subclass computes something of its own, and is left alone.
            if type(module) is nn.Linear:
                module.__class__ = WideningLinear
                # Past `Module.__setattr__`: this is no part of the model's state.
                module.__dict__["widening"] = self
            elif type(module) is nn.Embedding and self.is_exact:
                module.__class__ = WideningEmbedding


class WideningLinear(nn.Linear):
    widening: Widening

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        rows = input.numel() // input.shape[-1]
        if weight.dtype == torch.float32 or (rows <= NARROW_ROWS_MAX and not self.widening.is_exact):
            return functional.linear(input, weight, self.bias)
        output = _multiply(input.reshape(rows, -1).float(), weight, self.widening.scratch)
        if self.bias is not None:
            output += self.bias
        return output.to(input.dtype).view(*input.shape[:-1], -1)


class WideningEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return functional.embedding(input, self.weight).float()


def is_widening(module: nn.Module) -> bool:
    """Whether the weight of `module` may stay narrow although the model is computed in float32."""
    return isinstance(module, WideningLinear | WideningEmbedding)


def _multiply(input: Tensor, weight: Tensor, scratch: Tensor) -> Tensor:
    """input @ weight.T in float32, in blocks of as many rows of `weight` as fit in `scratch`."""
    features = weight.shape[1]
    block_rows = scratch.numel() // features
    if block_rows == 0:
        return torch.mm(input, weight.float().t())
    output = torch.empty(input.shape[0], weight.shape[0], dtype=torch.float32)
    for start in range(0, weight.shape[0], block_rows):
        block = weight[start : start + block_rows]
        widened = scratch[: block.numel()].view(block.shape)
        widened.copy_(block)
        torch.mm(input, widened.t(), out=output[:, start : start + block_rows])
    return output
