"""What a plan without a cluster knows of an optimizer rule of an installed package: the memory that it asks
for, where the package is installed on this machine too.

Owns the process that is asked, which loads torch and the package, and the sentence where nobody here can say.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.metadata import entry_points

import msgspec

from oobleckd.ctl.output import USAGE, Failure, note
from oobleckd.ctl.programs import run_worker
from oobleckd.protocol.job import Job
from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.protocol.optimizers import ENTRY_POINTS, RULES

_AS_ADAMW = "its memory is taken for AdamW's, two float32 numbers a parameter"


def knowable(job: Job) -> Job:
    """``job``, under adamw where it names a rule that no package on this machine has: whoever looks at the
    rest of it here could not find the rule.
    """
    if job.optimizer.name in RULES or _is_installed(job.optimizer.name):
        return job
    return msgspec.structs.replace(job, optimizer=Optimizer(group=job.optimizer.group))


def slot_bytes(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Bytes that the rule of ``optimizer``, which is none of ours, keeps of a parameter of each shape; None
    where nobody on this machine knows, and that is said. Raises Failure with exit code 2 for a rule that
    cannot be used.
    """
    name = optimizer.name
    if not _is_installed(name):
        note(f"optimizer.name: no package on this machine has the rule {name!r}, so {_AS_ADAMW}")
        return None
    if importlib.util.find_spec("torch") is None:
        note(f"optimizer.name: there is no torch here to load the rule {name!r} with, so {_AS_ADAMW}")
        return None
    words = "--optimizer", _json(optimizer), "--shapes", _json(shapes)
    try:
        told = run_worker("oobleckd.worker.tools.slots", *words)
    except Failure as failure:
        raise Failure(str(failure), failure.hint, USAGE) from failure
    return msgspec.json.decode(told, type=list[int])


def _is_installed(name: str) -> bool:
    return bool(entry_points(group=ENTRY_POINTS, name=name))


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
