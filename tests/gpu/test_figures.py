"""What NVML tells of a card is what torch knows of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from oobleckd.worker.device.context import DeviceContext, card_of, torch_device
from oobleckd.worker.telemetry import nvml
from tests.helpers import gpu

pytestmark = pytest.mark.gpu


def test_nvml_knows_the_card_and_counts_its_memory(tmp_path: Path) -> None:
    device = torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))
    if gpu.REHEARSAL:
        assert card_of(device) == ""
        return
    library = nvml.load()
    assert library is not None, "install the extra nvml"
    card = nvml.find(library, card_of(device))
    assert card is not None
    kept = torch.ones(1 << 28, device=device)
    torch.cuda.synchronize()
    found = nvml.read(library, card, {os.getpid()})
    assert found.name == torch.cuda.get_device_name(device)
    assert kept.nbytes <= found.used_bytes <= found.total_bytes
    assert found.total_bytes == pytest.approx(torch.cuda.get_device_properties(device).total_memory, rel=0.1)
    assert 0 <= found.utilisation <= 1
    assert 0 < found.temperature_c < 120
    assert 0 < found.power_w <= 1.5 * found.power_limit_w
    assert 0 < found.clock_mhz <= found.clock_max_mhz
