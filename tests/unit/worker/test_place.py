"""What a device says of where it computes, and how."""

from __future__ import annotations

from pathlib import Path

import torch

from oobleckd.protocol.parts import DeviceInfo
from worker.place import _cpu_maker, arithmetic

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


def test_who_made_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t: 1\n\nprocessor\t: 1\nvendor_id\t: Other\n"
    )
    assert _cpu_maker(file) == "GenuineIntel"
    file.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert _cpu_maker(file) == "0x41"
    file.write_text("")
    assert _cpu_maker(file) == ""
    assert _cpu_maker(tmp_path / "none") == ""
