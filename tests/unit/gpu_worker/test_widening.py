"""Layers that widen 16-bit weights: the same products as in float32, for any shape, block and number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from services.gpu_worker.engines.widening import NARROW_ROWS_MAX, Widening, WideningLinear, is_widening


def a_linear(*, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(24, 40, bias=bias, dtype=dtype).requires_grad_(False)


@pytest.mark.parametrize("scratch_elements", [8, 24, 100, 10_000], ids=lambda n: f"{n} elements of scratch")
@pytest.mark.parametrize("shape", [(1, 1, 24), (2, 24), (1, 7, 24), (3, 5, 24)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_float32(scratch_elements: int, shape: tuple[int, ...], bias: bool) -> None:
    linear = a_linear(bias=bias, dtype=torch.bfloat16)
    wide = nn.Linear(24, 40, bias=bias)
    wide.load_state_dict({name: tensor.float() for name, tensor in linear.state_dict().items()})
    Widening(scratch=torch.empty(scratch_elements), is_exact=True).apply(linear)
    values = torch.randn(shape)
    torch.testing.assert_close(linear(values), wide(values))


@pytest.mark.parametrize("rows", [1, NARROW_ROWS_MAX, NARROW_ROWS_MAX + 1, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_keep_their_dtype_and_are_nearly_exact(rows: int, dtype: torch.dtype) -> None:
    linear = a_linear(bias=True, dtype=dtype)
    exact = a_linear(bias=True, dtype=dtype).float()
    values = torch.randn(1, rows, 24).to(dtype)
    Widening.make(is_exact=False).apply(linear)
    output = linear(values)
    assert output.dtype is dtype
    torch.testing.assert_close(output.float(), exact(values.float()), atol=0.02, rtol=0.02)


def test_weights_in_32_bits_are_used_as_they_are() -> None:
    linear = a_linear(bias=True, dtype=torch.float32)
    values = torch.randn(5, 24)
    before = linear(values)
    Widening(scratch=torch.empty(0), is_exact=False).apply(linear)
    assert torch.equal(linear(values), before)


def test_embeddings_widen_only_for_exactness_and_subclasses_never() -> None:
    class Own(nn.Linear):
        pass

    for is_exact in (True, False):
        model = nn.ModuleList([nn.Embedding(4, 8, dtype=torch.bfloat16), nn.Linear(8, 8), Own(8, 8)])
        Widening.make(is_exact=is_exact).apply(model)
        assert [is_widening(module) for module in model] == [is_exact, True, False]
        assert model[0](torch.tensor([1])).dtype is (torch.float32 if is_exact else torch.bfloat16)
        assert type(model[1]) is WideningLinear
        assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias", "2.weight", "2.bias"]
