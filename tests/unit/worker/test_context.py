"""What a device says of where it computes, and how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oobleckd.protocol.parts import DeviceInfo
from oobleckd.worker.device.context import DeviceContext, arithmetic, no_cuda, torch_device
from oobleckd.worker.runtime.errors import UserError

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


def test_no_cuda_device_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"no CUDA device: torch \S+ is built without CUDA") as caught:
        torch_device(DeviceContext("a/0", "cuda", "h", "127.0.0.1", tmp_path))
    assert "--kind cpu" in caught.value.hint
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system.\nPlease check that you have one")

    monkeypatch.setattr(torch.cuda, "init", init)
    assert no_cuda({}) == "Found no NVIDIA driver on your system."
    hidden = no_cuda({"CUDA_VISIBLE_DEVICES": "-1"})
    assert hidden.endswith("(CUDA_VISIBLE_DEVICES='-1' hides those that are not in it)")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert no_cuda({}) == "torch sees none on this machine"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert no_cuda({}) == ""
