"""Owns how a linear layer with 16-bit weights is computed on a CPU that has no instructions for them.

There, torch multiplies 16-bit matrices at a seventh of the speed of float32, except by a single vector, which is bound
by memory and twice as fast as in float32. So a pass over few tokens (decode) uses the weights as they are, and a pass
over many (prefill) widens them block by block into a small scratch buffer that stays in the processor's cache, and
multiplies in float32. Weights stay where they are, shared and in half the memory; sums are more exact than in 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# Where widening begins to pay: two rows cost twice one row, widening about three times (measured, 576 × 1536).
NARROW_ROWS_MAX = 2
# 8 MiB of float32: a part of any server's last-level cache, and whole layers of small models.
SCRATCH_ELEMENTS = 2 * 1024 * 1024


class WideningLinear(nn.Linear):
    """A linear layer that widens its weight for many rows. Made from an `nn.Linear` by `widen_linears`."""

    scratch: Tensor

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        rows = input.numel() // input.shape[-1]
        if rows <= NARROW_ROWS_MAX or weight.dtype == torch.float32:
            return functional.linear(input, weight, self.bias)
        wide = input.reshape(rows, -1).float()
        output = torch.empty(rows, weight.shape[0], dtype=torch.float32)
        _multiply(wide, weight, output, self.scratch)
        if self.bias is not None:
            output += self.bias
        return output.to(input.dtype).view(*input.shape[:-1], -1)


def widen_linears(model: nn.Module, scratch: Tensor) -> None:
    """Turn every plain linear layer of `model` into a widening one; all share `scratch` (flat, float32)."""
    for module in model.modules():
        # A subclass computes something of its own.
        if type(module) is nn.Linear:
            module.__class__ = WideningLinear
            # Past `Module.__setattr__`: scratch is no part of the model's state.
            module.__dict__["scratch"] = scratch


def make_scratch() -> Tensor:
    return torch.empty(SCRATCH_ELEMENTS, dtype=torch.float32)


def _multiply(wide: Tensor, weight: Tensor, output: Tensor, scratch: Tensor) -> None:
    """output = wide @ weight.T, in blocks of as many rows of `weight` as fit in `scratch`."""
    features = weight.shape[1]
    block_rows = scratch.numel() // features
    if block_rows == 0:
        torch.mm(wide, weight.float().t(), out=output)
        return
    for start in range(0, weight.shape[0], block_rows):
        block = weight[start : start + block_rows]
        widened = scratch[: block.numel()].view(block.shape)
        widened.copy_(block)
        torch.mm(wide, widened.t(), out=output[:, start : start + block_rows])
