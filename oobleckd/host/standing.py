"""Compares what a program inherits from whoever starts it (limits, control group, environment, …) with what a
fork would have.

A leaf for what starts programs by fork (``oobleckctl up``, ``oobleckd.worker.fork.base``): libraries read
some of the environment when they are loaded, and limits, control group, scheduling and the rest are of the
process that is forked. Who asks for a fork and finds another standing there than its own uses exec.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # What a micro-batch freed is kept for the next one, in large pages; else its pages are cleared by the
    # kernel again and again, a twentieth of a CPU device's time. Given back when the job ends
    # (``oobleckd.worker.device.device``).
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824"
    ":glibc.malloc.trim_threshold=1073741824"
    # One heap: threads that read sums make the totals, others free them, and a heap for each thread would
    # keep the most that it ever had.
    ":glibc.malloc.arena_max=1",
}
"""Of every device process, where the agent's own environment does not say otherwise."""

_READ_AT_IMPORT = (
    "ATEN_", "BLIS_", "C10_", "CUBLAS_", "CUDA_", "GLIBC_", "GOMP_", "GOTO_", "HF_", "HOME", "KMP_", "LANG",
    "LC_", "LD_", "MALLOC_",
    "MKL_", "NCCL_", "NPY_", "NUMEXPR_", "NUMPY_", "NVIDIA_", "OMP_", "ONEDNN_", "DNNL_", "OPENBLAS_",
    "PYTHON", "PYTORCH_", "SAFETENSORS_",
    "TMPDIR", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TZ", "USE_", "VECLIB_", "VIRTUAL_ENV", "XDG_",
)  # fmt: skip
"""Beginnings of the names of variables that Python, the C library, torch or what comes with it look at once
and never again.
"""
_PACKAGE = Path(__file__).resolve().parents[1]
_CODE = (".", "planner", "worker")  # a walk follows no links


class Birth(msgspec.Struct, frozen=True):
    """A program to start by fork: its module, of ``PROGRAMS``, its command line, environment and folder, and
    the standing of who asks.

    Its output goes where the one or two descriptors lead that come along. ``attended``: who asks waits for
    its end, and ends it by going away.
    """

    words: tuple[str, ...]
    environ: dict[str, str]
    folder: str
    standing: dict[str, str]
    module: str = "oobleckd.worker.agent.main"
    attended: bool = False


PROGRAMS = frozenset(
    {
        "oobleckd.worker.agent.main",
        "oobleckd.worker.fork.base",
        "oobleckd.worker.tools.export",
        "oobleckd.worker.tools.look",
        "oobleckd.worker.tools.parameters",
        "oobleckd.worker.tools.reference",
        "oobleckd.worker.tools.samples",
        "oobleckd.worker.tools.slots",
    }
)
"""What may be started so."""


class Born(msgspec.Struct, frozen=True):
    """Its process, or why there is none."""

    pid: int = 0
    problem: str = ""


class Ended(msgspec.Struct, frozen=True):
    """An attended program has ended: its exit code, or the negative number of the signal that ended it."""

    code: int


def standing(environ: Mapping[str, str]) -> dict[str, str]:
    """Of this process, with ``environ`` for what it starts: what is compared, by its name for people."""
    read = sorted(f"{name}={value}" for name, value in {**ENVIRONMENT, **environ}.items() if _is_read(name))
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    namespaces = sorted(f"{path.name} {path.readlink()}" for path in Path("/proc/self/ns").iterdir())
    return {
        "environment": "\n".join(read),
        "limits": " ".join(f"{name}={resource.getrlimit(getattr(resource, name))}" for name in limits),
        "user": f"{os.getresuid()} {os.getresgid()} {sorted(os.getgroups())}",
        "umask": _line("/proc/self/status", "Umask:"),
        "capabilities": _line("/proc/self/status", "CapEff:") + _line("/proc/self/status", "NoNewPrivs:"),
        "control group": Path("/proc/self/cgroup").read_text(encoding="utf-8"),
        "namespaces": "\n".join(namespaces),
        "priority": f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)}",
        "processors": str(sorted(os.sched_getaffinity(0))),
        "memory score": Path("/proc/self/oom_score_adj").read_text(encoding="ascii"),
        "code": f"{sys.prefix} {_PACKAGE} {_newest()}",
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """In what two standings differ, for people; "" where they do not."""
    return ", ".join(name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name))


def _is_read(name: str) -> bool:
    return name.startswith(_READ_AT_IMPORT)


def _line(file: str, begin: str) -> str:
    lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    return next((line for line in lines if line.startswith(begin)), "")


def _newest() -> int:
    """When our code was changed last (ns): a process that loaded it before has other code."""
    return max(
        (entry.stat().st_mtime_ns for part in _CODE for entry in (_PACKAGE / part).rglob("*.py")), default=0
    )
