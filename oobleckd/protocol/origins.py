"""``JOB[@STEP]``: a checkpoint named by the job that wrote it, as ``submit --resume`` and the API take it.

Owns how that is written, and which of the job's checkpoints it means. Pure: whoever asks finds the job.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from oobleckd.protocol.jobviews import JobView, KeptView
from oobleckd.words import being, count

_NAMED = re.compile(r"(?P<job>[a-z0-9][a-z0-9._-]*)(@(?P<step>[0-9]{1,18}))?")


class NamedCheckpoint(NamedTuple):
    """Of ``job``, an id or a name, the checkpoint after ``step`` steps; None: its newest."""

    job: str
    step: int | None


class NotKept(ValueError):
    """The job has no such checkpoint. ``hint``: what to do next."""

    def __init__(self, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.hint = hint


def named_checkpoint(text: str) -> NamedCheckpoint | None:
    """What ``text`` names; None where it is a folder."""
    found = _NAMED.fullmatch(text)
    if found is None:
        return None
    return NamedCheckpoint(found["job"], None if found["step"] is None else int(found["step"]))


def kept_checkpoint(view: JobView, step: int | None) -> KeptView:
    """The newest checkpoint of the job, or that after ``step`` steps. Raises NotKept."""
    if not view.kept:
        hint = (
            "it has nothing to go on from"
            if view.finished_at is not None
            else f"`oobleckctl checkpoint {view.id} --wait` has it write one"
        )
        raise NotKept(f"{view.id} {being(view.state)} and has no checkpoint", hint)
    found = [kept for kept in view.kept if step in {None, kept.step}]
    if not found:
        steps = ", ".join(f"{kept.step:,}" for kept in view.kept)
        table = view.spec.checkpoint
        raise NotKept(
            f"{view.id} has no checkpoint after {count(step or 0, 'step')}, only after {steps}",
            f"of those that checkpoint.every = {table.every} has written, the newest {table.keep} stay "
            "(checkpoint.keep): set it higher where a job is to be branched",
        )
    return found[-1]
