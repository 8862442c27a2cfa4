"""Rules on a GPU, as a device sets it up: an update repeats to the bit, together and apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.worker.device.context import DeviceContext, torch_device
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.digest import digest
from tests.helpers import gpu
from tests.helpers.optimizers import drawn, shape_of

pytestmark = pytest.mark.gpu
SHAPES: list[tuple[int, ...]] = [(768,), (7,), (768, 256), (33, 5)]
STEPS = 3
RECIPES: list[dict[str, Any]] = [
    {}, {"state": "bf16"}, {"name": "adam"}, {"name": "sgd", "momentum": 0.9}, {"name": "lion"},
    {"name": "muon"}, {"name": "adafactor"},
]  # fmt: skip


@pytest.mark.parametrize("table", RECIPES, ids=lambda table: " ".join(map(str, table.values())) or "adamw")
def test_an_update_repeats_together_and_apart(table: dict[str, Any], tmp_path: Path) -> None:
    device = torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))

    def trained(keys: list[int]) -> list[torch.Tensor]:
        shapes = [SHAPES[key] for key in keys]
        params = [drawn(SHAPES, 0)[key].to(device) for key in keys]
        state = BucketState.fresh(shape_of(shapes, Optimizer(**table)), params)
        for step in range(STEPS):
            grads = [drawn(SHAPES, step + 1)[key].to(device) for key in keys]
            state.update_(grads, applied=step, lr=0.01)
        assert all(tensor.device.type == device.type for tensor in state.tensors())
        return [tensor.detach() for tensor in state.named([str(key) for key in keys]).values()]

    whole = trained(list(range(len(SHAPES))))
    assert digest(whole, ()) == digest(trained(list(range(len(SHAPES)))), ())
    apart = [tensor for key in range(len(SHAPES)) for tensor in trained([key])]
    assert sorted(digest([tensor], ()) for tensor in whole) == sorted(
        digest([tensor], ()) for tensor in apart
    )
