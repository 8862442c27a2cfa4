"""The verb ``export``: a job's model as a folder for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from oobleckd.client import Client
from oobleckd.ctl.connect import connected
from oobleckd.ctl.jobs import new_checkpoint
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import FAILED, REFUSED, TIMED_OUT, USAGE, Failure, emit_item, emit_line, fail, note
from oobleckd.ctl.programs import run_worker
from oobleckd.ctl.waiting import FINAL, TimedOut
from oobleckd.host.export import Exported, why_not
from oobleckd.host.hold import held
from oobleckd.host.program import Seconds
from oobleckd.protocol.checkpoint import MANIFEST
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.units import parse_size
from oobleckd.unixhttp import ApiProblem
from oobleckd.words import being, count, seconds, size, skipped

_CONFLICT = 409
_TRIES = 5


@click.command()
@click.argument("job")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--shard-size", default="5GB", show_default=True, metavar="SIZE", help="Largest file of weights."
)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True,
              help="What weights are stored as; bfloat16 rounds them.")  # fmt: skip
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace a model that was exported to DIR before, if nothing in DIR was changed since.",
)
@click.option("--timeout", "timeout_s", type=Seconds(), default=600.0, show_default=True, metavar="S",
              help="How long to wait for the checkpoint of a running job.")  # fmt: skip
@connected
def export(
    client: Client, job: str, folder: Path, shard_size: str, dtype: str, overwrite: bool, timeout_s: float
) -> None:
    """Write the model of JOB to DIR as transformers' from_pretrained loads it. Prints the folder.

    A running job writes a checkpoint first and goes on; of any other job it is the last checkpoint.
    """
    shard_bytes = _bytes_of(shard_size)
    folder = folder.expanduser().absolute()
    if refusal := why_not(folder, overwrite=overwrite):
        fail(*refusal, USAGE)
    if refusal := why_read(folder, client.jobs()):
        fail(*refusal, USAGE)
    words = ["--out", str(folder), "--shard-bytes", str(shard_bytes), "--dtype", dtype]
    words += ["--overwrite"] if overwrite else []
    view, told = _exported(client, _with_checkpoint(client, job, timeout_s), words)
    _say(view, msgspec.json.decode(told, type=Exported))


def _exported(client: Client, view: JobView, words: Sequence[str]) -> tuple[JobView, str]:
    """What the worker's program says that wrote the checkpoint of ``view``, or a newer one where that was
    gone before it could be held.
    """
    for left in reversed(range(_TRIES)):
        with held(Path(view.checkpoint)) as there:
            try:
                if there or not left:
                    how = ("--checkpoint", view.checkpoint, *words, "--job", view.id)
                    return view, run_worker("oobleckd.worker.tools.export", *how)
            except Failure:
                if not left or (Path(view.checkpoint) / MANIFEST).exists():
                    raise
        view = client.job(view.id)
    raise AssertionError("the last try returns or raises")


def why_read(folder: Path, jobs: Sequence[JobView]) -> tuple[str, str] | None:
    """Problem and hint where ``folder`` is one that a job reads, or lies in it, or the other way round; None
    where it may be written.
    """
    there = folder.resolve()
    for job in jobs:
        data = job.spec.data
        for key, text in (
            ("model.checkpoint", job.spec.model.checkpoint),
            ("data.path", data.path),
            ("data.prepared", data.prepared),
            ("data.tokenizer", data.tokenizer),
        ):
            read = Path(text).resolve()
            if text and (read == there or read in there.parents or there in read.parents):
                problem = f"{folder}: {job.id} reads {text} ({key}), and export would change that"
                return problem, "name a folder that no job reads"
    return None


def _bytes_of(shard_size: str) -> int:
    try:
        shard_bytes = parse_size(shard_size)
    except ValueError as error:
        raise Failure(f"--shard-size: {error}", 'write a number with a unit, such as "5GB"', USAGE) from error
    if not shard_bytes:
        fail("--shard-size: 0 leaves no room for weights", 'write a number with a unit, such as "5GB"', USAGE)
    return shard_bytes


def _with_checkpoint(client: Client, job: str, timeout_s: float) -> JobView:
    """``job`` with the checkpoint to export: a new one where it is in training, else its last."""
    view = client.job(job, unique=True)
    if view.state not in FINAL:
        try:
            view = new_checkpoint(client, view, timeout_s)
        except TimedOut as error:
            raise Failure(
                f"{view.name}: no checkpoint within {seconds(timeout_s)}",
                "try again with a longer --timeout",
                TIMED_OUT,
            ) from error
        except ApiProblem as problem:
            if problem.status != _CONFLICT:
                raise
            view = client.job(view.id)  # it makes no steps now, or has just ended
    if not view.checkpoint:
        fail(
            f"{view.name} {being(view.state)} at step {view.step} and has no checkpoint to export",
            f"see `oobleckctl describe job {view.id}`",
            FAILED if view.state in FINAL else REFUSED,
        )
    return view


def _say(view: JobView, done: Exported) -> None:
    if wants_json():
        emit_item("Export", done)
        return
    emit_line(done.path)
    if done.left:
        note(f"somebody put files into the folder that it replaces: that is {done.left} now")
    files = count(len(done.files), "file")
    note(
        f"{view.name} after step {done.step} of {view.steps}: {done.architecture}, "
        f"{size(done.num_bytes)} of {done.dtype} in {files}"
    )
    if done.skipped:
        note(f"warning: {count(done.step, 'step')}, {skipped(done.skipped)}: these made no update")
    if done.not_finite:
        note(
            f"warning: {count(len(done.not_finite), 'tensor')} with NaN or infinity, such as "
            f"{done.not_finite[0]}"
        )
