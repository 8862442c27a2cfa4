"""The worker's C file as it is now, compiled for the tests, wherever they run and whatever was installed."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
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
    """Where the libraries of rooms are, until the tests end. Processes of one run share them, as a compiler
    takes seconds: one builds, and the last one that has them takes them away.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    folder = Path(tempfile.gettempdir()) / f"oobleckd-kernels-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # Two locks: who waits for a build must not wait for those that have what was built.
    used = (folder / "used").open("w")
    with (folder / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        fcntl.flock(used, fcntl.LOCK_SH)
        done = folder / "done"
        if not done.exists():
            build(folder)
            done.touch()

    def leave() -> None:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return folder / "oobleckd" / "worker"


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
