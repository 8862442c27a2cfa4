"""The demo cut off: by Ctrl-C or by SIGTERM, it ends all that it has started, and its folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oobleckd.ctl import processes
from tests.helpers.family import members

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_cut_off_while_the_cluster_comes_up(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, ROOT / "examples/demo.py"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as demo:  # fmt: skip
        assert demo.stdout
        assert any(line.startswith("$ oobleckctl up") for line in demo.stdout)
        (folder,) = tmp_path.iterdir()
        os.killpg(demo.pid, number)  # as a terminal does: to the demo and to the command that it runs
        assert demo.wait() == 130
    assert not processes.outlive(members(folder), 10.0)
    assert not folder.exists()
