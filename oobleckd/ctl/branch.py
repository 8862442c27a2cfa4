"""``submit --resume JOB[@STEP]``: a job goes on from a checkpoint of another one, or of its own.

Owns which checkpoint that is, what a person is told of the difference, and what is refused: another model,
and other samples where nobody said so. A folder, or the newest of the same name, is ``submit``'s own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from oobleckd.client import Client
from oobleckd.ctl.output import USAGE, fail, note
from oobleckd.protocol.branching import KeyChange, changes, keeps_alike, same_rates
from oobleckd.protocol.job import Job
from oobleckd.protocol.origins import NotKept, kept_checkpoint, named_checkpoint
from oobleckd.unixhttp import ApiProblem
from oobleckd.words import count

LATEST = "latest"
_NOT_FOUND = 404
_ORDER_HINT = "where that is meant, say so: --set {key}=…"


class Origin(NamedTuple):
    """The checkpoint ``place`` of ``job`` (of the id ``id``) after ``step`` steps, which itself began after
    ``start_step``.
    """

    id: str
    job: Job
    step: int
    place: str
    start_step: int = 0


def origin_of(client: Client, resume: str) -> Origin | None:
    """What ``--resume`` names; None where it is the newest of the same name, or a folder. Raises Failure with
    exit code 2.
    """
    named = named_checkpoint(resume)
    if resume in {"", LATEST} or named is None or Path(resume).is_dir():
        return None
    try:
        view = client.job(named.job, unique=True)
    except ApiProblem as problem:
        if problem.status != _NOT_FOUND:
            raise
        fail(f"--resume: {resume} is no job, and no folder", "`oobleckctl get jobs` lists the jobs", USAGE)
    try:
        kept = kept_checkpoint(view, named.step)
    except NotKept as error:
        fail(f"--resume: {error}", error.hint, USAGE)
    return Origin(view.id, view.spec, kept.step, kept.directory, view.start_step)


def check(origin: Origin, job: Job, said: Sequence[str]) -> None:
    """Refuse what cannot go on, and tell what ``job`` changes. ``said``: texts of ``--set``. Raises Failure
    with exit code 2.
    """
    found = changes(origin.job, job)
    for each in found:
        if each.effect == "model":
            hint = "export the checkpoint and start from its folder, with model.checkpoint"
            fail(f"{each}: the checkpoint of {origin.id} is of another model", hint, USAGE)
        if each.effect == "order" and not _is_said(each.key, said):
            key = each.key
            problem = f"{each}: other samples than those with which {origin.id} would go on"
            fail(problem, _ORDER_HINT.format(key=key), USAGE)
    if not keeps_alike(origin.job.optimizer, job.optimizer):
        hint = "export the checkpoint and start from its weights, with model.checkpoint"
        fail(f"optimizer: another state is kept than the checkpoint of {origin.id} has", hint, USAGE)
    if job.train.steps <= origin.step:
        more = "ask for more: --set train.steps=…, or go on from an earlier one, JOB@STEP"
        steps = count(origin.step, "step")
        fail(f"train.steps = {job.train.steps}: the checkpoint has {steps} already", more, USAGE)
    note(f"goes on from {origin.id} after step {origin.step:,}, {origin.place}")
    for line in consequences(origin, job, found):
        note(line)


def consequences(origin: Origin, job: Job, found: Sequence[KeyChange]) -> list[str]:
    """What is changed, by what follows of it, for people."""
    later = f"changes the bits from step {origin.step + 1:,} on"
    lines = []
    for effects, follows in (
        (("order",), f"other samples from step {origin.step + 1:,} on"),
        (("rate", "bits"), later),
        (("none",), "shows in no bit"),
    ):
        these = [str(each) for each in found if each.effect in effects]
        if these:
            lines.append(f"{', '.join(these)}: {follows}")
    if job.train.exact and all(each.effect in {"rate", "none"} for each in found):
        lines.append(_beside_a_whole_run(origin, job))
    return lines


def _beside_a_whole_run(origin: Origin, job: Job) -> str:
    """Whether the result is that of a run of ``job`` from its first step, where only rates are changed."""
    if not same_rates(origin.job, job, origin.step):
        before = count(origin.step, "step")
        return (
            f"another run than this job from its first step: the first {before} had other learning rates "
            "(docs/recipe.md)"
        )
    if origin.start_step:
        return (
            f"{origin.id} itself went on from a checkpoint, so `verify` says whether this is a run of its own"
        )
    return "the same bits as a run of this job from its first step"


def _is_said(key: str, said: Sequence[str]) -> bool:
    keys = [text.partition("=")[0] for text in said]
    return any(key == each or key.startswith(f"{each}.") or each.startswith(f"{key}.") for each in keys)
