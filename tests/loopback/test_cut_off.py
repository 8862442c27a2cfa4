"""A long run cut off, as ``timeout`` does it: it ends the cluster that it is starting, and its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.ctl import processes
from tests.helpers.family import members

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One whose path is short enough for a socket below it."""
    with tempfile.TemporaryDirectory(prefix="cut-") as made:
        yield Path(made)


@pytest.mark.parametrize("group", [True, False], ids=["all of it", "it alone"])
@pytest.mark.parametrize(
    ("name", "args", "state"),
    [("chaos.py", ["--seed", "0"], "*x*"), ("bubbles.py", ["--only", "oobleckd, 1f1b"], "ours")],
    ids=["chaos", "bubbles"],
)
def test_cut_off(folder: Path, name: str, args: list[str], state: str, group: bool) -> None:
    with subprocess.Popen(
        [sys.executable, ROOT / "benchmarks" / name, *args],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as run:  # fmt: skip
        assert run.stderr
        while not (states := list(folder.glob(f"*/{state}"))) or len(members(states[0])) < 2:
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.05)
        os.kill(run.pid, signal.SIGTERM)
        if group:
            os.killpg(run.pid, signal.SIGTERM)
        said = run.stderr.read()
        assert run.wait() == 130
    assert said == "stopped; what this had started is ended\n"
    assert not processes.outlive(members(states[0]), 10.0)
    assert not list(folder.iterdir())
