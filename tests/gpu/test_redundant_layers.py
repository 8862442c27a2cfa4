"""Forward passes ahead on a GPU: what autograd saves lies in the host's memory, and the gradients have the
same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from oobleckd.planner.plan import Range, Route, Segment
from oobleckd.worker.device.context import DeviceContext, torch_device
from oobleckd.worker.models import Batch, Layer, gradients, load_spec, seed_layer
from oobleckd.worker.round.redundant_forward import RedundantForwards
from oobleckd.worker.round_machine.tasks import Task
from tests.helpers import gpu
from tests.helpers.models import small_job

pytestmark = pytest.mark.gpu
TASK = Task(Route(0, 1, (Segment("a/0", Range(0, 1)), Segment("b/0", Range(1, 2)))), 1)


@pytest.fixture
def device(tmp_path: Path) -> torch.device:
    return torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))


def block(device: torch.device, family: str, precision: str) -> tuple[Layer, Tensor]:
    """The first block of a small model, and what goes into it."""
    spec = load_spec(small_job(family, train={"precision": precision}))
    params = {
        key: value.requires_grad_()
        for bucket in spec.buckets
        for key, value in zip(bucket.keys, spec.init(bucket.index, device), strict=True)
    }
    tokens = torch.arange(16, device=device).view(2, 8)
    first, second = (
        spec.layer(i, {k: params[k] for b in spec.buckets_of(i) for k in spec.buckets[b].keys}, device)
        for i in (0, 1)
    )
    return second, first(None, Batch(tokens, tokens)).detach()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_backward_of_what_was_run_ahead_has_the_same_bits(
    device: torch.device, family: str, precision: str
) -> None:
    layer, x = block(device, family, precision)
    redundant = RedundantForwards(1 << 30)
    assert redundant.expect(TASK, x)
    assert redundant.begins(TASK)
    found = []
    for ahead in (False, True):
        into = x.detach().requires_grad_()
        seed_layer(0, 0, 0, 1, device)
        if ahead:
            with redundant.saving(TASK, into, layer.leaves):
                out = layer(into, None)
        else:
            out = layer(into, None)
        found.append([out.detach(), *gradients(out, [*layer.leaves, into], torch.ones_like(out))])
    assert redundant.held_bytes > 0
    assert all(map(torch.equal, *found))
