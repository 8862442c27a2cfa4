"""The processes of a simulation of many runs: they do not outlive it."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
PROGRAM = """
import os
from concurrent.futures import ProcessPoolExecutor
from oobleckd.simulator import runs

pipe = os.environ["STARTED"]

def endless(part, questions):
    with open(pipe, "w") as told:
        told.write(f"{os.getpid()}\\n")
    while True:
        pass

runs._all_of = endless
if __name__ == "__main__":
    from tests.unit.simulator.build import question
    runs.run_all([question(), question("slipstream")], 2)
"""


def lines(path: Path, count: int) -> list[str]:
    """So many lines of those who write to the pipe ``path``."""
    found: list[str] = []
    while len(found) < count:
        with path.open() as pipe:
            found += pipe.read().split()
    return found


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_they_end_with_it(tmp_path: Path, how: str) -> None:
    program, pipe = tmp_path / "many.py", tmp_path / "started"
    program.write_text(PROGRAM)
    os.mkfifo(pipe)
    environment = {**os.environ, "STARTED": str(pipe), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(program)], env=environment) as running:
        processes = [os.pidfd_open(int(pid)) for pid in lines(pipe, 2)]
        getattr(running, how)()
        for process in processes:
            ended, _, _ = select.select([process], [], [], TIMEOUT_S)
            assert ended, "a process goes on without the one that started it"
            os.close(process)
