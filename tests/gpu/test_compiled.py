"""Compiled layers on a card: two processes, each with a folder of its own, make kernels with the same bits.

python -m tests.gpu.test_compiled FOLDER FAMILY: prints what a step comes to; compiled things lie in FOLDER.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oobleckd.worker.device.context import DeviceContext, torch_device
from oobleckd.worker.models.compiled import keep_in
from oobleckd.worker.state.digest import digest
from tests.gpu.test_exact import step
from tests.helpers import gpu
from tests.helpers.models import small_job

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def print_digest(folder: Path, family: str) -> None:
    """Of the loss and all gradients of one micro-batch, as a device computes them."""
    torch.set_num_threads(1)
    keep_in(folder / "kept")
    device = torch_device(DeviceContext("node-1/0", gpu.KIND, "here", "127.0.0.1", folder))
    job = small_job(family, train={"precision": "bf16", "compile": True})
    once, again = step(job, device), step(job, device)
    assert all(torch.isfinite(tensor).all() for tensor in once)
    assert digest(once, ()) == digest(again, ())
    print(digest(once, ()))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_processes_that_compile_by_themselves_have_the_same_bits(tmp_path: Path, family: str) -> None:
    said = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        argv = [sys.executable, "-m", "tests.gpu.test_compiled", str(tmp_path / name), family]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ})
        assert done.returncode == 0, done.stderr[-4000:]
        assert any((tmp_path / name / "kept").iterdir())
        said.append(done.stdout.split()[-1])
    assert said[0] == said[1]


if __name__ == "__main__":
    print_digest(Path(sys.argv[1]), sys.argv[2])
