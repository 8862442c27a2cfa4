"""The look that agents, ``up`` and ``doctor`` take at GPUs sees what torch sees, and what is hidden."""

from __future__ import annotations

import os

import pytest
import torch

from oobleckd.host import gpus
from oobleckd.protocol.gpus import trouble
from tests.helpers import gpu

pytestmark = pytest.mark.gpu


def test_a_look_sees_what_torch_sees() -> None:
    seen = gpus.look()
    assert seen.torch == torch.__version__
    if gpu.REHEARSAL:
        return
    count = torch.cuda.device_count()
    assert [each.name for each in seen.gpus] == [torch.cuda.get_device_name(index) for index in range(count)]
    assert [each.capability for each in seen.gpus] == [
        torch.cuda.get_device_capability(index) for index in range(count)
    ]
    assert trouble(seen, count) is None
    found = trouble(seen, count + 1)
    assert found is not None
    assert found.code == "too-few"


@pytest.mark.parametrize("visible", ["", "-1", "99"])
def test_gpus_that_are_hidden(visible: str) -> None:
    _, found = gpus.usable(1, environ={**os.environ, "CUDA_VISIBLE_DEVICES": visible})
    assert found is not None
    assert found.code == ("cpu-build" if torch.version.cuda is None else "hidden")
