"""The tests of ``make test-gpu``, on a CPU: what is typed wrong in them comes out before somebody has a GPU
at hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

GPU_TESTS = Path(__file__).resolve().parents[1] / "gpu"
TIMEOUT_S = 300.0
# Clusters, which they take to the end four times; and a minute of a compiler, which a CPU's own test has.
LONG = (
    "test_a_kill_does_not_show and not backward-bf16 or test_processes_that_compile "
    "or test_a_kill_in_a_gather_does_not_show"
)
# Beside a CPU a rule about CUDA is wrong.
OF_A_CARD = "test_the_rule_is_what_torch_does_in_strict_mode"


def test_the_tests_for_a_gpu_pass_a_rehearsal() -> None:
    with tempfile.TemporaryDirectory(
        prefix="gpu-"
    ) as folder:  # of pytest's the names are too long for sockets
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={folder}/t",
                "-m", "gpu", "-k", f"not ({LONG} or {OF_A_CARD})", GPU_TESTS,
            ],
            env={**os.environ, "OOBLECK_GPU_REHEARSAL": "1"},
            capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
