"""The verb ``delete``: jobs that are over, out of the lists. Owns the question to a person, and what it says
is left.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from oobleckd.client import Client
from oobleckd.ctl.connect import connected
from oobleckd.ctl.get.kinds import listed, means_kind
from oobleckd.ctl.names import job_names
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import REFUSED, USAGE, Failure, emit_item, fail, note
from oobleckd.ctl.waiting import FINAL
from oobleckd.protocol.jobviews import JobView
from oobleckd.words import being, count


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="JOB...", shell_complete=job_names)
@click.option("-y", "--yes", is_flag=True, help="Do not ask, as on no terminal.")
@connected
def delete(client: Client, words: tuple[str, ...], yes: bool) -> None:
    """Take each JOB that is over out of all lists. Its checkpoints stay, and their folders are printed; what
    happened to nodes stays, too.
    """
    jobs = [client.job(name, unique=True) for name in _named(words)]
    jobs = list({job.id: job for job in jobs}.values())
    for job in jobs:
        if job.state not in FINAL:
            fail(
                f"{job.id} {being(job.state)}: only what is over is deleted",
                f"`oobleckctl cancel {job.id} --wait` ends it first",
                REFUSED,
            )
    if not yes and sys.stdin.isatty() and sys.stderr.isatty():
        _ask(jobs)
    for job in jobs:
        answer = client.delete(job.id)
        if wants_json():
            emit_item("Accepted", answer)
        else:
            note(answer.message)


def _named(words: Sequence[str]) -> Sequence[str]:
    """Names of jobs: ``NAME...``, ``job NAME...`` or ``job/NAME...``. Raises Failure with exit code 2."""
    if "/" not in words[0] and not (len(words) > 1 and means_kind(words[0])):
        return words
    names: list[str] = []
    for kind, found in listed(words):
        if kind.plural == "nodes":
            raise Failure(
                "only jobs are deleted", "`oobleckctl forget-node NODE` is for one that is gone", USAGE
            )
        if kind.plural != "jobs":
            raise Failure(f"only jobs are deleted, and {kind.plural} are none", "name jobs", USAGE)
        names += found
    return names


def _ask(jobs: Sequence[JobView]) -> None:
    for job in jobs:
        kept = f"; its checkpoints stay, the newest in {job.checkpoint}" if job.checkpoint else ""
        note(f"{job.id} {being(job.state)} at step {job.step}{kept}")
    click.confirm(f"delete {count(len(jobs), 'job')}?", abort=True, err=True)
