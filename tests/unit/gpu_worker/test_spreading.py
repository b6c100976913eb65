"""Models over several devices, with torch's meta device as the second one: it computes shapes, and refuses mixtures."""

from __future__ import annotations

import ckptio
import pytest
import torch
from torch import Tensor, nn

from services.gpu_worker.engines.engine import EngineError
from services.gpu_worker.engines.partition_tensors import partition_tensors
from services.gpu_worker.engines.spreading import Spread
from tests.unit.gpu_worker.tiny_models import TinyModel


class Layer(nn.Module):
    """A residual layer with a table that it computed for itself, as attention has."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, device=device)
        self.register_buffer("table", torch.ones(4), persistent=False)

    def forward(self, hidden: Tensor, *, positions: tuple[Tensor, Tensor]) -> Tensor:
        return hidden + self.linear(hidden) * self.table * positions[0] + positions[1]


class Model(nn.Module):
    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, device=devices[0])
        self.layers = nn.ModuleList(Layer(device) for device in devices)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        positions = (torch.ones(4, device=hidden.device), torch.zeros(4, device=hidden.device))
        for layer in self.layers:
            hidden = layer(hidden, positions=positions)
        return hidden


def test_what_goes_into_a_layer_is_moved_to_where_the_layer_is() -> None:
    model = Model("cpu", "meta")
    with pytest.raises(RuntimeError):
        model(torch.tensor([1, 2]))
    spread = Spread(model)
    assert spread.device == torch.device("cpu")
    assert [layer.table.device.type for layer in model.layers] == ["cpu", "meta"]
    assert model(torch.tensor([1, 2], device=spread.device)).device.type == "meta"
    spread.close()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_model_on_one_device_computes_as_if_nothing_were_there() -> None:
    model = Model("cpu", "cpu")
    expected = model(torch.tensor([1, 2]))
    spread = Spread(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.equal(model(torch.tensor([1, 2])), expected)
    spread.close()


def test_computed_buffers_follow_the_tensors() -> None:
    """Rotary frequencies are in no checkpoint."""
    model = Model("meta")
    Spread(model).close()
    assert model.layers[0].table.device.type == "meta"


def test_memory_of_a_gpu_that_torch_cannot_see_is_an_error_that_says_what_to_do(
    tiny_models: dict[str, TinyModel],
) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU here")
    index = ckptio.read_index(tiny_models["llama"].checkpoint)
    with (
        ckptio.DeviceBuffer.allocate("host", index.partitions[0].padded_bytes) as buffer,
        pytest.raises(EngineError, match="sees no GPU; install a build of torch with CUDA"),
    ):
        partition_tensors(index, [buffer])
