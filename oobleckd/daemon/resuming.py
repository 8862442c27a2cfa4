"""Where a job that is handed in with ``resume`` goes on from: which folder, and what its manifest says."""

from __future__ import annotations

from pathlib import Path

import msgspec

from oobleckd.core import view
from oobleckd.daemon import answers
from oobleckd.daemon.refusal import Refusal
from oobleckd.daemon.service import Service
from oobleckd.protocol.checkpoint import MANIFEST, Manifest
from oobleckd.protocol.origins import NotKept, kept_checkpoint, named_checkpoint
from oobleckd.protocol.unreadable import UNREADABLE


def checkpoint_folder(service: Service, resume: str) -> str:
    """The folder that ``resume`` is, or that ``JOB`` or ``JOB@STEP`` names. Raises Refusal."""
    named = named_checkpoint(resume)
    if named is None:
        return resume
    job = answers.find_job(service, named.job, unique=True)
    try:
        return kept_checkpoint(view.job_view(service.core, job), named.step).directory
    except NotKept as error:
        raise Refusal(422, "invalid", str(error), error.hint) from None


def manifest_of(folder: str) -> Manifest | None:
    """Of the checkpoint in ``folder``; None when it is none."""
    if not folder:
        return None
    try:
        return msgspec.json.decode((Path(folder) / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, ValueError, *UNREADABLE):  # no such file, no path at all, or no manifest
        return None
