"""The verb ``verify``: a job against its reference run, bit by bit."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import click

from oobleckd.client import Client
from oobleckd.ctl import reference
from oobleckd.ctl.compare import CompareError, RunEvidence, Verdict, compare, inputs_of
from oobleckd.ctl.connect import connected
from oobleckd.ctl.names import job_argument
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import FAILED, REFUSED, emit_item, emit_line, fail, note
from oobleckd.protocol.inputs import differing
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.traits import KIND, NONE, Traits, alike, between
from oobleckd.words import being, count, seconds


@click.command()
@job_argument
@click.option(
    "--single", is_flag=True, help="Make the reference run in a single process instead of on the cluster."
)
@click.option("--fresh", is_flag=True, help="Make the reference run again even if one is kept from before.")
@connected
def verify(client: Client, job: str, single: bool, fresh: bool) -> None:
    """Compare JOB with a run of the same job without failures: losses, samples, weights, bit by bit.

    Exit 0: identical. Exit 1: different, or not comparable; the first difference is named.
    """
    view = client.job(job, unique=True)
    ours, verdict = judge(client, view, single=single, fresh=fresh)
    _say(view, ours, verdict)


def judge(client: Client, view: JobView, *, single: bool, fresh: bool = False) -> tuple[RunEvidence, Verdict]:
    """A finished job, and what the comparison with its reference run says. Raises Failure where there is
    none.
    """
    _check(view)
    file = reference.kept_file(client, view, single=single)
    try:
        with reference.made_once(file):
            kept = None if fresh else reference.recall(file)
            if kept is None:
                kept = _make(client, view, file, single=single)
                reference.keep(file, kept)
            else:
                note("comparing with the run without failures that is kept from before")
            theirs = reference.evidence(view.spec, kept.steps, kept.checkpoint, evaluations=kept.evaluations)
        evaluations = client.evaluations(view.id) if view.spec.eval.wanted else ()
        ours = reference.run_of(view, client.steps(view.id), evaluations)
        _check_comparable(client, view, kept)
    except CompareError as error:
        fail(str(error), error.hint, FAILED)
    return ours, compare(ours, theirs)


def _check(view: JobView) -> None:
    if view.state != "done" and not reference.stopped(view):
        fail(
            f"{view.name} {being(view.state)} at step {view.step} of {view.steps}, so there is nothing to "
            "compare yet",
            f"oobleckctl wait {view.id} --for state=done",
            REFUSED,
        )
    if not view.spec.train.exact:
        fail(
            f"{view.name} is not comparable: train.exact is false, so the grouping of sums shows in the bits",
            "submit it with train.exact = true",
            FAILED,
        )


def _make(client: Client, view: JobView, file: Path, *, single: bool) -> reference.ReferenceRun:
    took_s = view.step_s * view.steps or max(0.0, (view.finished_at or 0.0) - view.submitted_at)
    took = f", where it took about {seconds(round(took_s))}" if took_s >= 1 else ""
    if single:
        note(f"verify trains {view.name} again, {count(view.steps, 'step')}, in a single process: "
             f"longer than on the cluster{took}")  # fmt: skip
        return reference.run_single(view.spec, file.with_suffix(""))
    about = f": about {seconds(round(took_s))}" if took_s >= 1 else ""
    note(f"verify trains {view.name} again, {count(view.steps, 'step')}, without failures{about}")
    return reference.run_on_cluster(client, view)


def _check_comparable(client: Client, view: JobView, kept: reference.ReferenceRun) -> None:
    """Equal bits are promised on one kind of device and for one text; elsewhere a difference
    means nothing.
    """
    # A daemon that was started upon a journal of before knows of no device: then only the reference run's
    # kind is known.
    ours, theirs = (
        reference.traits_of(client, view),
        kept.traits or tuple({KIND: kind} for kind in kept.kinds),
    )
    if not alike((*ours, *theirs)):
        _not_comparable("kinds of devices", *_told_apart(ours, theirs))
    if reference.stopped(view) or not kept.checkpoint:
        return
    read = (inputs_of(Path(place)) for place in (view.checkpoint, kept.checkpoint))
    for mine, other in differing(*read):
        _not_comparable("texts", mine.known, other.known)


def _told_apart(ours: Sequence[Traits], theirs: Sequence[Traits]) -> tuple[str, str]:
    """The kinds of each run, in short: of every trait in which any two of them differ its value."""
    every = [*ours, *theirs]
    names = {name: None for traits in every for name in between(traits, every[0])}
    return _kinds(ours, names), _kinds(theirs, names)


def _kinds(found: Sequence[Traits], names: Iterable[str]) -> str:
    said = (", ".join(_value(name, traits) for name in names) for traits in found)
    return " and ".join(dict.fromkeys(said))


def _value(name: str, traits: Traits) -> str:
    value = traits.get(name, NONE)
    return value if name == KIND else f"{name} {value}"


def _not_comparable(what: str, ours: str, theirs: str) -> None:
    fail(
        f"not comparable: different {what}: {ours} here, {theirs} without failures",
        f"run the job on one kind of device and on one text, then `oobleckctl verify --fresh`; {what} decide "
        "bits",
        FAILED,
    )


def _say(view: JobView, ours: RunEvidence, verdict: Verdict) -> None:
    if wants_json():
        emit_item("Verdict", verdict)
    else:
        emit_line(
            f"ledger: {count(verdict.samples, 'sample')} in {count(len(ours.steps), 'step')}, "
            f"digest {verdict.ledger[:16]}"
            f"; {count(view.incidents, 'incident')}, {count(view.steps_lost, 'step')} lost"
        )
        for finding in verdict.findings:
            emit_line(f"  {finding}")
        emit_line(verdict.sentence)
    if not verdict.identical:
        sys.exit(FAILED)
