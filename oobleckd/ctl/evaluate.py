"""The verb ``eval``: the loss of a checkpoint on text that it is asked about, without training on.

Owns which checkpoint that is, and the job that has nothing to do but to evaluate it: an ordinary one, which
waits its turn, loses nodes and is watched like any other. Which text: ``evalsources``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from oobleckd.client import Client
from oobleckd.ctl.compare import CompareError, read_manifest
from oobleckd.ctl.connect import connected
from oobleckd.ctl.evalsources import untied, with_sources
from oobleckd.ctl.jobfiles import as_found, read_job
from oobleckd.ctl.jobs import until_over
from oobleckd.ctl.liveline import followed
from oobleckd.ctl.look import look
from oobleckd.ctl.names import job_names
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import (
    CAUSES,
    FAILED,
    USAGE,
    emit_items,
    emit_json,
    emit_line,
    emit_table,
    fail,
    note,
)
from oobleckd.ctl.waiting import FINAL
from oobleckd.host.hold import held
from oobleckd.protocol.checkpoint import DAMAGED, PARTIAL
from oobleckd.protocol.job import Checkpoint, Job
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.parts import Counters
from oobleckd.protocol.requests import Accepted
from oobleckd.protocol.unreadable import problem_of
from oobleckd.unixhttp import ApiProblem
from oobleckd.words import being, count, loss, short

_NOT_FOUND = 404
_TRIES = 5
_NAME_LENGTH = 58  # of the 63 characters that a job's name may have


class Subject(NamedTuple):
    """What is evaluated: the state of ``job`` after ``step`` steps, in the folder ``place``. ``id``: of the
    job, "" where the folder was named.
    """

    job: Job
    step: int
    place: str
    id: str = ""


class _Written(msgspec.Struct, frozen=True):
    """What of a manifest says which state it is of."""

    counters: Counters
    spec: Job


@click.command()
@click.argument("what", metavar="JOB|CHECKPOINT", shell_complete=job_names)
@click.option(
    "--source", "sources", multiple=True, metavar="NAME=PATH",
    help="Text to evaluate on, as often as there are texts; NAME=KIND:PATH says what data.source says. "
    "Without: [eval] of the job.",
)  # fmt: skip
@click.option(
    "--from", "file", type=click.Path(path_type=Path), metavar="FILE",
    help="Take [eval] of this job.toml in place of the job's own.",
)  # fmt: skip
@click.option(
    "--sequences", type=click.IntRange(min=1), metavar="N",
    help="Sequences of each source. Without: as [eval] has them, or 64.",
)  # fmt: skip
@click.option(
    "--wait/--no-wait", "wait_", default=True,
    help="Stay until it is over, and print what it found. Or print the id of its job, and go.",
)  # fmt: skip
@connected
def eval(  # noqa: A001 - the verb's name
    client: Client, what: str, sources: tuple[str, ...], file: Path | None, sequences: int | None, wait_: bool
) -> None:
    """Evaluate the newest checkpoint of JOB, or a CHECKPOINT folder: loss and perplexity by source.

    A job of its own does that on the cluster, JOB-eval: it trains no step, and writes no checkpoint. While
    another job trains it waits in the queue.
    """
    if sources and file is not None:
        fail("--source and --from both say on what to evaluate", "leave one of them out", USAGE)
    subject = _subject(client, what)
    if file is not None:
        table = read_job(file).eval
        subject = subject._replace(job=msgspec.structs.replace(subject.job, eval=table))
    job = with_sources(_evaluating(subject), sources, sequences or 0)
    label = file or Path(what)
    job = as_found(job, label)
    look(job, label, folder=False)  # the checkpoint has the weights
    answer, subject = _submitted(client, job, subject)
    note(f"{answer.message or answer.id}: evaluates step {subject.step:,} in {subject.place}")
    if wait_:
        _say(client, followed(answer.id, lambda: until_over(client, answer.id)))
    elif wants_json():
        emit_json("Submitted", {"id": answer.id, "message": answer.message})
    else:
        emit_line(answer.id)


# ---------------------------------------------------------------------- what is evaluated


def _subject(client: Client, what: str) -> Subject:
    """A job, by name or id, or else a folder. Raises Failure with exit code 2."""
    if "/" in what:
        return _of_folder(Path(what).expanduser().absolute())
    try:
        return _of_job(client.job(what, unique=True))
    except ApiProblem as problem:
        if problem.status != _NOT_FOUND:
            raise
    if not Path(what).is_dir():
        fail(f"{what} is no job, and no folder", "`oobleckctl get jobs` lists the jobs", USAGE)
    return _of_folder(Path(what).absolute())


def _of_job(view: JobView) -> Subject:
    if not view.checkpoint:
        hint = (
            "nothing of it can be evaluated"
            if view.state in FINAL
            else f"`oobleckctl checkpoint {view.id} --wait` has it write one"
        )
        fail(f"{view.id} {being(view.state)} at step {view.step} and has no checkpoint yet", hint, USAGE)
    return Subject(view.spec, view.checkpoint_step, view.checkpoint, view.id)


def _of_folder(folder: Path) -> Subject:
    if not folder.is_dir():
        fail(f"{folder}: is no folder", "name a job, or a folder such as …/step-00000100", USAGE)
    if (folder / "config.json").exists():
        fail(
            f"{folder}: has a model of transformers, and no checkpoint of oobleckd",
            "a job with model.checkpoint = this folder and eval.at_start = true evaluates it",
            USAGE,
        )
    if folder.name.endswith((PARTIAL, DAMAGED)):
        fail(f"{folder}: is no complete checkpoint", "name another one, such as …/step-00000100", USAGE)
    try:
        manifest = msgspec.convert(read_manifest(folder), _Written)
    except CompareError as error:
        fail(str(error), error.hint or "name a folder such as …/step-00000100", USAGE)
    except msgspec.ValidationError as error:
        hint = "was it written by another version?"
        fail(f"{folder / 'manifest.json'}: cannot be read: {problem_of(error)}", hint, USAGE)
    return Subject(manifest.spec, manifest.counters.step, str(folder))


def _evaluating(subject: Subject) -> Job:
    """The job that goes on from there, where nothing is left to be trained."""
    job, step = subject.job, subject.step
    if not step:
        fail(
            f"{subject.place}: is from before the first step",
            "name a later one; eval.at_start = true evaluates what a job begins with",
            USAGE,
        )
    return msgspec.structs.replace(
        job,
        name=f"{job.name[:_NAME_LENGTH]}-eval",
        train=msgspec.structs.replace(job.train, steps=step),
        data=untied(job.data),
        # A manifest is anybody's: where it would have checkpoints written is no business of this job.
        checkpoint=Checkpoint(every=0),
    )


def _submitted(client: Client, job: Job, subject: Subject) -> tuple[Accepted, Subject]:
    """Hand in ``job``, from a newer checkpoint where that of ``subject`` was removed meanwhile."""
    for left in reversed(range(_TRIES if subject.id else 1)):
        with held(Path(subject.place)) as there:
            if there or not left:
                return client.submit(job, resume=subject.place), subject
        newer = _of_job(client.job(subject.id))
        subject = subject._replace(step=newer.step, place=newer.place)
        job = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, steps=newer.step))
    raise AssertionError("the last try returns or raises")


# ---------------------------------------------------------------------- what came of it


def _say(client: Client, view: JobView) -> None:
    if view.state != "done":
        fail(f"{view.name} {being(view.state)}", view.reason, CAUSES.get(view.cause, FAILED))
    found = [each for done in client.evaluations(view.id) for each in done.losses]
    if wants_json():
        emit_items("Evaluation", found)
        return
    emit_table(
        ("SOURCE", "LOSS", "PERPLEXITY", "TOKENS"),
        [
            (each.source, _figure(each.loss, loss), _figure(each.perplexity, short), f"{each.targets:,}")
            for each in found
        ],
    )
    note(f"{view.name} is done: {count(view.incidents, 'incident')}, no step was trained")


def _figure(value: float | None, words: Callable[[float], str]) -> str:
    """A dash where it is no finite number."""
    return "-" if value is None else words(value)
