"""The worker's C file as it is now, compiled for the tests, wherever they run and whatever was installed."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from oobleckd.worker.sums import Chunked, Fused, Sum
from oobleckd.worker.sums.compiled import Compiled, compiled

ROOT = Path(__file__).resolve().parents[2]


def build(folder: Path, **environment: str) -> Path:
    """Compile as an installation does, in ``environment``; where the library would be below ``folder``."""
    command = (
        *(sys.executable, "setup.py", "-q", "build_ext"),
        *("--build-lib", str(folder), "--build-temp", str(folder / "temp")),
    )
    env = os.environ | environment
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True)
    return folder / "oobleckd" / "worker" / "sums"


@functools.cache
def _built() -> Path:
    """Where the libraries of rooms are, until the tests of this process end."""
    folder = tempfile.mkdtemp(prefix="oobleckd-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(Path(folder)).parent


@functools.cache
def kernels() -> Compiled:
    found = compiled(_built() / "sums")
    assert found is not None, "the tests need a C compiler"
    return found


def update_folder() -> Path:
    """Where the library of updates is."""
    return _built() / "optimizers"


def fused(
    shapes: Sequence[tuple[int, ...]], exact: bool, device: torch.device, *, guarded: bool = False
) -> Sum:
    """As of ``Chunked`` and ``Whole``: float sums have no kernels."""
    if not exact:
        return Chunked(shapes, exact, device, guarded=guarded)
    return Fused(shapes, device, kernels(), guarded=guarded)
