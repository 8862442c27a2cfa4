"""What a device says of where it computes, and how."""

from __future__ import annotations

import torch

from oobleckd.protocol.parts import DeviceInfo
from worker.place import arithmetic

CPU = torch.device("cpu")


def test_what_decides_bits() -> None:
    said = arithmetic(CPU)
    assert f"torch {torch.__version__.partition('+')[0]}" in said
    assert torch.backends.cpu.get_cpu_capability() in said
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert arithmetic(CPU).endswith(", 1 thread")
        torch.set_num_threads(2)
        assert arithmetic(CPU).endswith(", 2 threads")
    finally:
        torch.set_num_threads(threads)
    one, other = (DeviceInfo("a/0", "cpu", "cpu", 0, "", "", 1, arithmetic=x) for x in (said, ""))
    assert one.decides_bits == f"cpu, {said}" != other.decides_bits == "cpu"
