"""What a look at GPUs takes from the kernel's and torch's files."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from oobleckd.protocol.gpus import GpuLook
from oobleckd.worker.tools import gpus


def test_device_files_and_who_may_open_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "nvidia-caps", "null"):
        (tmp_path / name).touch()
    version = tmp_path / "version"
    seen = gpus.of_kernel(GpuLook(), version, tmp_path)
    assert (seen.module, seen.files, seen.closed) == ("", 2, ())
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar\n")
    monkeypatch.setattr(os, "access", lambda path, _mode: path.name != "nvidia11")
    seen = gpus.of_kernel(GpuLook(), version, tmp_path)
    assert (seen.module, seen.closed) == ("550.54.15", (str(tmp_path / "nvidia11"),))
    assert gpus.of_kernel(GpuLook(), version, tmp_path / "none").files == 0


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("__version__ = '2.13.0'\ncuda = '13.0'\nhip = None\n", ("2.13.0", "13.0", False)),
        ("__version__ = '2.13.0+cpu'\ncuda = None\n", ("2.13.0+cpu", "", False)),
        ("__version__ = '2.13.0+rocm6.4'\ncuda = None\nhip = '6.4'\n", ("2.13.0+rocm6.4", "", True)),
    ],
)
def test_what_torch_was_built_with(
    said: str, found: tuple[str, str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version.py").write_text(said)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda _: spec)
    seen = gpus.of_torch(GpuLook())
    assert (seen.torch, seen.cuda, seen.other) == found


def test_no_torch_and_one_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda _: None)
    assert gpus.of_torch(GpuLook()) == GpuLook()
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(gpus.importlib.util, "find_spec", lambda _: spec)
    assert gpus.of_torch(GpuLook()).other
