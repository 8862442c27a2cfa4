"""Has a process look at this machine's GPUs (``oobleckd.worker.tools.gpus``), and says what is wrong with
them.

A leaf for whoever starts device processes or speaks of them: agents, ``up``, ``doctor``. CUDA's driver is
never loaded in the process that asks: what is forked of it later could not use it.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping

import msgspec

from oobleckd.host.interpreter import command
from oobleckd.host.standing import ENVIRONMENT
from oobleckd.protocol.gpus import GpuLook, GpuTrouble, trouble
from oobleckd.protocol.unreadable import UNREADABLE

PROGRAM = command("oobleckd.worker.tools.gpus")
ALL = -1
_LOOK_S = 60.0  # eight GPUs without nvidia-persistenced take some 20 s to begin
_VISIBLE = "CUDA_VISIBLE_DEVICES"


def look(num_tried: int = ALL, environ: Mapping[str, str] = os.environ) -> GpuLook:
    """What is there; the first ``num_tried`` GPUs are begun on."""
    seen = _ask(num_tried, environ)
    if seen.visible is None or seen.failure:
        return seen
    others = _ask(0, {name: value for name, value in environ.items() if name != _VISIBLE})
    return msgspec.structs.replace(seen, hidden=len(others.gpus))


def usable(
    devices: int, *, sharing: int = 1, environ: Mapping[str, str] = os.environ
) -> tuple[int, GpuTrouble | None]:
    """How many GPUs a node of ``devices`` devices has (``ALL``: of all that are visible), and why it cannot
    use them; ``sharing`` nodes are to use the same ones.
    """
    seen = look(devices, environ)
    # Of what is not known here the devices themselves say what is wrong.
    count = len(seen.gpus) or int(seen.other)
    wanted = max(1, count) if devices == ALL else devices
    return (count if devices == ALL else devices), trouble(seen, wanted, sharing)


def _ask(num_tried: int, environ: Mapping[str, str]) -> GpuLook:
    try:
        asked = subprocess.Popen(
            [*PROGRAM, f"--try={num_tried}"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env={**ENVIRONMENT, **environ},
        )  # fmt: skip
    except OSError as error:
        return GpuLook(failure=f"nobody can look: {error}")
    try:
        out, err = asked.communicate(timeout=_LOOK_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.returncode = -signal.SIGKILL  # not waited for: a driver that hangs may keep it for ever
        for pipe in filter(None, (asked.stdout, asked.stderr)):
            pipe.close()
        return GpuLook(failure=f"the NVIDIA driver does not answer within {_LOOK_S:.0f} s")
    try:
        return msgspec.json.decode(out, type=GpuLook)
    except UNREADABLE:
        said = (err.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        code = asked.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return GpuLook(failure=f"the NVIDIA driver cannot be asked: {said} ({how})")
