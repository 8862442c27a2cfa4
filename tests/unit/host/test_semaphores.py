"""Semaphores of a program that was killed with its helper are removed by the next one of its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHM = Path("/dev/shm")
KILLED = """
import multiprocessing, os, signal, sys
from multiprocessing import resource_tracker
from oobleckd.host import semaphores
semaphores.name_after(sys.argv[1])
lock = multiprocessing.get_context("spawn").Lock()
os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(owner: str) -> list[Path]:
    """What a program of that name leaves."""
    done = subprocess.run([sys.executable, "-c", KILLED, owner], check=False)
    assert done.returncode == -9
    return list(SHM.glob(f"sem.oobleckd-{owner}-*"))


def test_what_a_killed_program_left_goes_when_the_next_of_its_name_starts(tmp_path: Path) -> None:
    mine, other = f"{tmp_path.name}a", f"{tmp_path.name}b"
    (left,), (of_other,) = killed(mine), killed(other)
    run = "import sys; from oobleckd.host import semaphores; semaphores.name_after(sys.argv[1])"
    subprocess.run([sys.executable, "-c", run, mine], check=True)
    assert not left.exists()
    assert of_other.exists(), "another program's may be in use"
    of_other.unlink()


def test_a_pool_works_under_such_names(tmp_path: Path) -> None:
    code = (
        "import os, sys; from concurrent.futures import ProcessPoolExecutor; import multiprocessing\n"
        "from oobleckd.host import semaphores\n"
        "if __name__ == '__main__':\n"
        "    semaphores.name_after(sys.argv[1])\n"
        "    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context('spawn')) as pool:\n"
        "        assert pool.submit(abs, -3).result() == 3\n"
        "        assert [*os.scandir('/dev/shm')]\n"
    )
    script = tmp_path / "pool.py"
    script.write_text(code, encoding="utf-8")
    subprocess.run([sys.executable, script, tmp_path.name], check=True)
    assert not list(SHM.glob(f"sem.oobleckd-{tmp_path.name}-*"))
