"""The verb ``drill``: plays a script of faults against a job, and ends with pass or fail by ``verify``.

Owns the playing. What is played is ``drillfile``'s, the comparison ``verify``'s.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import click
import msgspec

from oobleckd.client import Client, state_dir
from oobleckd.ctl.cluster import start_again
from oobleckd.ctl.compare import Verdict
from oobleckd.ctl.connect import connected
from oobleckd.ctl.drillfile import Act, Drill, DrillError, load_drill, script_of
from oobleckd.ctl.jobfiles import as_found, read_job
from oobleckd.ctl.liveline import followed, live_line
from oobleckd.ctl.local import Home
from oobleckd.ctl.look import look
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import FAILED, REFUSED, TIMED_OUT, USAGE, Failure, emit_json, emit_line, fail, note
from oobleckd.ctl.verify import judge
from oobleckd.ctl.waiting import FINAL, TimedOut, until_final, views
from oobleckd.host.program import Seconds
from oobleckd.protocol.jobviews import JobView
from oobleckd.words import being, count, seconds


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--seed", type=int, default=0, show_default=True, help="What is random in FILE follows from it."
)
@click.option("--job", default="", metavar="ID", help="Play against this job, whatever FILE says.")
@click.option("--dry-run", is_flag=True, help="Print the script and stop.")
@click.option(
    "--timeout",
    "timeout_s",
    type=Seconds(),
    default=600.0,
    show_default=True,
    help="For each fault.",
)
@connected
def drill(client: Client, file: Path, seed: int, job: str, dry_run: bool, timeout_s: float) -> None:
    """Play the faults of FILE, a drill.toml, against a job; then compare the job with a run without failures.

    Exit 0: every fault was survived and the result is bit for bit the same. Exit 1: it is not.
    """
    try:
        wanted = load_drill(file)
        script = script_of(wanted, seed, _usable(client))
    except DrillError as error:
        raise Failure(str(error), error.hint, USAGE) from error
    if dry_run:
        _emit(seed, script)
        return
    for number, act in enumerate(script, 1):
        note(f"{number}. {act}")
    if not client.status().allow_injection:
        fail("failure injection is off", "start the daemon with allow_injection = true", REFUSED)
    view = _job_of(client, wanted, job, file)
    followed(view.id, lambda: _played(client, view.id, wanted, seed, script, timeout_s))


def _played(
    client: Client, job: str, wanted: Drill, seed: int, script: Sequence[Act], timeout_s: float
) -> None:
    for number, act in enumerate(script, 1):
        _play(client, job, number, act, timeout_s)
    _end(client, job, wanted, seed, script)


def _usable(client: Client) -> list[str]:
    return [node.name for node in client.nodes() if node.state in {"standby", "active"}]


def _job_of(client: Client, wanted: Drill, job: str, file: Path) -> JobView:
    """The job to play against: one that is there, or one that is submitted now."""
    name = job or wanted.job
    if not name:
        fail(f"{file}: no job", 'add job = "job.toml", or name one with --job', USAGE)
    if job or not name.endswith(".toml"):
        return client.job(name)
    wanted_job = as_found(read_job(file.parent / name), file.parent / name)
    look(wanted_job, file.parent / name)
    answer = client.submit(wanted_job)
    note(f"{answer.id}: {answer.message}")
    return client.job(answer.id)


# --------------------------------------------------------------------------- one fault


def _play(client: Client, job: str, number: int, act: Act, timeout_s: float) -> None:
    what = f"fault {number} ({act})"
    _await(client, job, lambda view: view.step >= act.step, f"{what}: not at step {act.step}", timeout_s)
    time.sleep(act.after_s)
    view = client.job(job)
    if view.state in FINAL:
        _too_late(view, what)
    hit = [node for node in act.nodes if node in view.nodes]
    before = _losses(client, job)
    note(f"step {view.step}: {act.how} {', '.join(act.nodes)}")
    for node in act.nodes:
        client.kill(node, act.how, at=act.phase, seconds=act.for_s)
    if hit and (act.start or act.wait != "no"):
        _await(
            client, job, lambda _view: _recovered(client, job, hit, before), f"{what}: not over", timeout_s
        )
    if act.start:
        for node in act.nodes:
            start_again(Home(state_dir()), node, timeout_s)
    if act.wait == "whole":
        _await(client, job, lambda view: _is_whole(client, view, hit), f"{what}: not whole", timeout_s)


def _losses(client: Client, job: str) -> Counter[str]:
    """How often each node was lost to the job."""
    return Counter(node for found in client.incidents() if found.job == job for node in found.nodes)


def _recovered(client: Client, job: str, hit: Sequence[str], before: Counter[str]) -> bool:
    """Whether the loss of all of these was noticed, and is over."""
    now = _losses(client, job)
    under_way = any(found.open for found in client.incidents() if found.job == job)
    return not under_way and all(now[node] > before[node] for node in hit)


def _is_whole(client: Client, view: JobView, hit: Sequence[str]) -> bool:
    """Whether these are back in the plan, or the job has ended well before that."""
    under_way = any(found.open for found in client.incidents() if found.job == view.id)
    back = view.state == "running" and not under_way and set(hit) <= set(view.nodes)
    return back or view.state == "done"


def _await(client: Client, job: str, holds: Callable[[JobView], bool], what: str, timeout_s: float) -> None:
    try:
        with live_line() as show:
            for view in views(client, job, timeout_s):
                show(view)
                if holds(view):
                    return
                if view.state in FINAL:
                    _too_late(view, what)
    except TimedOut as error:
        raise Failure(
            f"{what} within {seconds(timeout_s)}", "`oobleckctl events` tells more", TIMED_OUT
        ) from error


def _too_late(view: JobView, what: str) -> NoReturn:
    hint = view.reason or "give the job more steps, or the fault an earlier one"
    fail(f"{what}: {view.name} {being(view.state)} at step {view.step} before it", hint, FAILED)


# --------------------------------------------------------------------------- the end


def _end(client: Client, job: str, wanted: Drill, seed: int, script: Sequence[Act]) -> None:
    with live_line() as show:
        done = until_final(client, job, show)
    if done.state != "done":
        fail(f"{done.name} {being(done.state)} at step {done.step}", done.reason, FAILED)
    _, verdict = judge(client, done, single=wanted.verify == "single")
    _emit(seed, script, done, verdict)
    if not verdict.identical:
        sys.exit(FAILED)


def _emit(
    seed: int, script: Sequence[Act], view: JobView | None = None, verdict: Verdict | None = None
) -> None:
    if wants_json():
        acts = [{**msgspec.to_builtins(act), "text": str(act)} for act in script]
        fields = {"seed": seed, "script": acts}
        if view is not None and verdict is not None:
            fields |= {
                "job": view.id, "passed": verdict.identical, "incidents": view.incidents,
                "steps_lost": view.steps_lost, "verdict": verdict,
            }  # fmt: skip
        emit_json("Drill", fields)
        return
    if view is None or verdict is None:
        for act in script:
            emit_line(str(act))
        return
    word = "passed" if verdict.identical else "FAILED"
    emit_line(
        f"{word}: seed {seed}, {count(len(script), 'fault')}, {count(view.incidents, 'incident')}, "
        f"{count(view.steps_lost, 'step')} lost"
    )
    emit_line(verdict.sentence)
