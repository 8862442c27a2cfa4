"""A look at the folder that a job's model starts from, before the job is handed in.

Owns the question alone: what is wrong with a folder, and what is to be said of it, the worker knows
(``oobleckd.worker.tools.look``).
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import msgspec

from oobleckd.ctl.output import USAGE, Failure, note
from oobleckd.ctl.programs import run_worker
from oobleckd.protocol.job import Job, table_of
from oobleckd.protocol.modelnotes import FolderNote

_NEEDED = ("torch", "transformers")


def notes_on(job: Job, source: Path) -> tuple[FolderNote, ...]:
    """What is to be said of the folder of ``job``, a job of the file ``source``; nothing where it has none,
    or where there is no torch.

    Raises Failure with exit code 2 where no device would take it.
    """
    if not job.model.checkpoint:
        return ()
    if not all(importlib.util.find_spec(name) for name in _NEEDED):
        note(f"{job.model.checkpoint} is looked at by the nodes: there is no torch here")
        return ()
    from oobleckd.ctl.reference import to_toml  # no other submit needs what comes with it

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(to_toml(table_of(job)), encoding="utf-8")
        try:
            told = run_worker("oobleckd.worker.tools.look", "--job", str(file))
        except Failure as failure:
            raise Failure(f"{source}: {failure}", failure.hint, USAGE) from failure
    return msgspec.json.decode(told, type=tuple[FolderNote, ...])
