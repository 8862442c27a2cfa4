"""The training log of a job, as trainers print it: a line for each step, and between them evaluations and
incidents where they happened. ``logs JOB`` and the words of a step are its.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from oobleckd.client import Client
from oobleckd.ctl.get.watching import happening
from oobleckd.ctl.options import wants_json
from oobleckd.ctl.output import emit_item, emit_line, note, when
from oobleckd.ctl.waiting import FINAL
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView, StepView
from oobleckd.unixhttp import Unreachable
from oobleckd.words import being, count, learning_rate, loss, rate, seconds, short

_BACK = 200  # steps before the newest, which a rollback may have done again


class TrainingLine(NamedTuple):
    """What happened ``at``: ``text`` for people, ``kind`` and ``item`` for programs, a ``key`` of its own."""

    at: float
    key: str
    text: str
    kind: str
    item: msgspec.Struct


def print_log(client: Client, name: str, num_lines: int, *, follow: bool) -> None:
    """Print the last lines of the log of the job ``name``; ``follow``: and go on until it is over, or until
    Ctrl-C. Raises the client's errors.
    """
    job = client.job(name)
    first = max(1, job.step - num_lines + 1)
    lines = sorted(_lines(client, job, first))
    seen = {line.key for line in lines}
    for line in lines[-num_lines:] if num_lines else []:
        _put(line)
    if not follow:
        return
    with happening(client) as happened:
        while job.state not in FINAL and happened():
            try:
                job = client.job(job.id)
                fresh = sorted(
                    line for line in _lines(client, job, max(1, job.step - _BACK)) if line.key not in seen
                )
            except Unreachable:
                continue
            for line in fresh:
                seen.add(line.key)
                _put(line)
    note(f"{job.id} {being(job.state)}{': ' if job.reason else ''}{job.reason}")


def _put(line: TrainingLine) -> None:
    if wants_json():
        emit_item(line.kind, line.item)
    else:
        emit_line(f"{when(line.at, 0)}  {line.text}")


def _lines(client: Client, job: JobView, first: int) -> Iterator[TrainingLine]:
    """Steps from number ``first`` on, and what happened among them."""
    steps = client.steps(job.id, first)
    began = steps[0].at if steps and first > 1 else 0.0
    for step in steps:
        yield TrainingLine(
            step.at, f"step {step.step} {step.generation} {step.at}", step_words(step, job), "Step", step
        )
    for found in client.evaluations(job.id, max(0, first - 1)) if job.spec.eval.wanted else ():
        yield TrainingLine(found.at, f"eval {found.step} {found.at}", _evaluated(found), "Evaluation", found)
    for incident in client.incidents():
        if incident.job == job.id and incident.at + incident.total_s >= began:
            yield TrainingLine(incident.at, f"{incident.id} opened", _opened(incident), "Incident", incident)
            if not incident.open:
                at = incident.at + incident.total_s
                yield TrainingLine(at, f"{incident.id} closed", _closed(incident), "Incident", incident)


def step_words(step: StepView, job: JobView) -> str:
    """``"step   12/200  loss 5.1234  grad norm 1.23  lr 0.0003  8,123 tokens/s  1.2 s"``."""
    width = len(str(job.steps))
    tokens = step.samples * job.spec.train.sequence
    speed = f"{rate(tokens / step.step_s)} tokens/s  {seconds(step.step_s)}" if step.step_s else ""
    skipped = "" if step.outcome == "applied" else f"  {step.outcome}"
    return (
        f"step {step.step:>{width}}/{job.steps}  loss {_number(step.loss):<8}  "
        f"grad norm {_norm(step.grad_norm):<6}  lr {learning_rate(step.lr):<9}  {speed}{skipped}"
    ).rstrip()


def _number(value: float | None) -> str:
    return "NaN" if value is None else loss(value)


def _norm(value: float | None) -> str:
    return "NaN" if value is None else short(value)


def _evaluated(found: EvaluationView) -> str:
    losses = ", ".join(f"{each.source} {_number(each.loss)}" for each in found.losses)
    return f"evaluated after step {found.step}: {losses}, in {seconds(found.seconds)}"


def _opened(incident: IncidentView) -> str:
    return f"{incident.id} in step {incident.step}: {', '.join(incident.nodes)}: {incident.cause}"


def _closed(incident: IncidentView) -> str:
    lost = count(incident.steps_lost, "step")
    return f"{incident.id} is over after {seconds(incident.total_s)}, {lost} lost: {incident.reason}"
