"""A chaos run cut off, as ``timeout`` does it: it ends the cluster that it has started, and its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from oobleckd.ctl import processes
from tests.helpers.family import members

ROOT = Path(__file__).resolve().parents[2]


def test_cut_off(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, ROOT / "benchmarks/chaos.py", "--seed", "0"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as chaos:  # fmt: skip
        assert chaos.stderr
        while not (states := list(tmp_path.glob("*/*x*"))) or len(members(states[0])) < 2:
            assert chaos.poll() is None, chaos.stderr.read()
            time.sleep(0.05)
        os.kill(chaos.pid, signal.SIGTERM)
        os.killpg(chaos.pid, signal.SIGTERM)
        said = chaos.stderr.read()
        assert chaos.wait() == 130
    assert said == "stopped; what this had started is ended\n"
    assert not processes.outlive(members(states[0]), 10.0)
    assert not list(tmp_path.iterdir())
