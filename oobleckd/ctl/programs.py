"""Programs of the worker that a verb runs on this machine, because they need torch and oobleckctl
has none.
"""

from __future__ import annotations

import subprocess

from oobleckd.client import state_dir
from oobleckd.ctl.local import ONE_THREAD, Home
from oobleckd.ctl.output import CAUSES, FAILED, Failure
from oobleckd.host.interpreter import command


def run_worker(module: str, *words: str) -> str:
    """What ``python -m MODULE WORDS…`` prints. Raises Failure with the program's own ``error:`` and
    ``hint:``.

    Where a local cluster runs, it is a fork of that cluster's base, which has torch loaded.
    """
    home = Home(state_dir())
    ended = home.base.run(module, words, ONE_THREAD) or subprocess.run(
        command(module, *words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or ["it said nothing"]
        told = dict(line.split(": ", 1) for line in said if line.startswith(("error: ", "hint: ")))
        code = ended.returncode if ended.returncode in CAUSES.values() else FAILED
        raise Failure(told.get("error", f"{module} failed: {said[-1]}"), told.get("hint", ""), code)
    return ended.stdout
