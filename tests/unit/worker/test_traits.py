"""What decides the bits of a process' results, as it finds out about itself."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers

from oobleckd import worker
from oobleckd.protocol.traits import between
from oobleckd.worker.device.traits import UNKNOWN, code_of, cpu_field, driver_version, traits
from tests.helpers.cards import CUDA, Card

CPU = torch.device("cpu")


def test_a_cpu() -> None:
    found = traits(CPU)
    assert found["device"] == "cpu"
    assert found["transformers"] == transformers.__version__
    assert found["torch"].startswith(f"{torch.__version__} (")
    assert found["threads"] == str(torch.get_num_threads())
    assert torch.backends.cpu.get_cpu_capability() in found["host"]
    assert found["oobleckd"].endswith(f"({code_of(Path(worker.__file__).parent)})")
    assert all(found.values())
    assert traits(CPU) == found


def test_a_card_of_the_same_name_with_fewer_multiprocessors_is_another_one() -> None:
    whole, cut = (traits(CUDA, Card(multi_processor_count=count)) for count in (132, 114))
    assert between(whole, cut) == {"SMs": ("132", "114")}
    assert {"transformers", "torch", "cuDNN", "cuBLAS", "CUDA", "driver", "host"} <= whole.keys()
    assert "threads" not in whole
    other = traits(CUDA, Card("NVIDIA H200"))
    assert between(whole, other) == {"device": ("NVIDIA H100 80GB HBM3", "NVIDIA H200")}


@pytest.mark.parametrize("name", ["NVIDIA_TF32_OVERRIDE", "MKL_CBWR", "CUBLAS_WORKSPACE_CONFIG"])
def test_settings_by_which_libraries_choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    without = traits(CPU)
    monkeypatch.setenv(name, "1")
    assert between(without, traits(CPU)) == {name: ("none", "1")}


def test_how_exact_products_of_matrices_are() -> None:
    before = torch.get_float32_matmul_precision()
    found = traits(CPU)
    try:
        torch.set_float32_matmul_precision("high")
        assert between(found, traits(CPU)) == {"float32 matmul": (before, "high")}
    finally:
        torch.set_float32_matmul_precision(before)


def test_other_code_is_another_digest(tmp_path: Path) -> None:
    ours = Path(worker.__file__).parent
    copy = shutil.copytree(ours, tmp_path / "worker", ignore=shutil.ignore_patterns("__pycache__"))
    assert code_of(copy) == code_of(ours) != ""
    with (copy / "sums" / "whole.py").open("a") as file:
        file.write("# changed\n")
    assert code_of(copy) != code_of(ours)
    assert code_of(tmp_path / "none") == ""


def test_the_driver(tmp_path: Path) -> None:
    file = tmp_path / "version"
    open_one = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x)\n"
    closed_one = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.51  Thu\nGCC version:  gcc 12.2.0\n"
    for text, version in ((open_one, "580.65.06"), (closed_one, "575.51")):
        file.write_text(text)
        assert driver_version(file, ("false",)) == version
    hidden = tmp_path / "none"
    said = (sys.executable, "-c", "print('580.1'); print('580.1')")
    assert driver_version(hidden, said) == "580.1"
    for nothing in (("false",), ("true",), (str(hidden),)):
        assert driver_version(hidden, nothing) == UNKNOWN


def test_who_made_the_cpu(tmp_path: Path) -> None:
    def maker() -> str:
        return cpu_field("vendor_id", "CPU implementer", file=file)

    file = tmp_path / "cpuinfo"
    file.write_text(
        "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel\t: 1\n\nprocessor\t: 1\nvendor_id\t: Other\n"
    )
    assert maker() == "GenuineIntel"
    file.write_text("processor\t: 0\nCPU implementer\t: 0x41\n")
    assert maker() == "0x41"
    file.write_text("")
    assert maker() == ""
    file.unlink()
    assert maker() == ""
