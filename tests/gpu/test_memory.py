"""What a device says when its memory is full: of the card, in bytes, and by the class that torch really
raises.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oobleckd.protocol.deaths import OUT_OF_MEMORY
from oobleckd.worker.device.context import DeviceContext, device_memory_bytes, torch_device
from oobleckd.worker.device.traits import UNKNOWN, traits
from oobleckd.worker.runtime.deaths import death_in_full, is_out_of_memory
from tests.helpers import gpu

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(tmp_path: Path) -> torch.device:
    return torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", tmp_path))


def test_a_full_card(device: torch.device) -> None:
    kept = torch.ones(1 << 20, device=device)
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    assert is_out_of_memory(caught.value)
    death = death_in_full(caught.value, "forward", "job-1", 1, device, 0)
    assert death is not None
    assert death.kind == OUT_OF_MEMORY
    memory = death.memory
    assert memory is not None
    assert memory.wanted == 1 << 50
    assert kept.nbytes <= memory.used <= memory.capacity <= device_memory_bytes(device)
    again = torch.ones(1 << 20, device=device)  # words did not need the process to end
    assert torch.equal(kept, again)


def test_what_decides_bits_is_known(device: torch.device) -> None:
    found = traits(device)
    assert UNKNOWN not in found.values()
    if not gpu.REHEARSAL:
        properties = torch.cuda.get_device_properties(device)
        assert (found["device"], found["SMs"]) == (properties.name, str(properties.multi_processor_count))
