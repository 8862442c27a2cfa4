"""The job in words: how far, how safe, and whether what it computes is what a run without failures would.
Pure.
"""

from __future__ import annotations

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import nothing
from oobleckd.draw.lines import Line, clipped, flow
from oobleckd.draw.times import dated
from oobleckd.protocol.api import JobView
from oobleckd.words import count, loss, rate, seconds, why_skipped

DEPENDS = ("job", "link")


def paint(view: View, now: float, width: int, height: int) -> list[Line]:
    """Progress, exactness, checkpoints."""
    job = view.job
    if job is None:
        return nothing((("no job yet: `oobleckctl submit job.toml` hands one in", "dim"),), height)
    lines = [
        *flow(_progress(job), width),
        clipped(exactness(job), width),
        *flow(_kept(job, view.clock(now)), width),
    ]
    return lines[:height]


def exactness(job: JobView) -> Line:
    """The tick: same samples, same order, nothing given up; else how far the job went back."""
    if job.steps_lost:
        lost = f"went back {count(job.steps_lost, 'step')} to a checkpoint; they were computed again"
        return (("exact ", "dim"), ("! ", "warn"), (lost, "warn"))
    words = f"no step lost in {count(job.incidents, 'incident')}: same samples, same order"
    return (
        ("exact ", "dim"),
        ("✓ ", "good"),
        (words, ""),
        ("   `oobleckctl verify` compares every bit", "dim"),
    )


def _progress(job: JobView) -> list[Line]:
    left = max(0, job.steps - job.step)
    fields: list[Line] = [
        ((job.name, "strong"), (f" ({job.id})", "dim")),
        (("step ", "dim"), (f"{job.step:,}", "strong"), (f" of {job.steps:,}", "dim")),
        *_skipped(job),
        (("policy ", "dim"), (job.policy, "")),
    ]
    if job.samples_per_s:
        fields.append(((rate(job.samples_per_s), "strong"), (" samples/s", "dim")))
        fields.append((("a step ", "dim"), (seconds(job.step_s), "")))
        fields.append((("the rest ", "dim"), (f"about {seconds(left * job.step_s)}", "")))
    return fields


def _skipped(job: JobView) -> list[Line]:
    """Steps without an update, where there are any."""
    if not job.steps_skipped:
        return []
    row = f", {job.skipped_in_row} in a row now" if job.skipped_in_row else ""
    said = f"{job.steps_skipped:,}{row}: {why_skipped(job.steps_skipped, job.steps_spiked)}"
    return [(("skipped ", "dim"), (said, "bad" if job.skipped_in_row else "warn"))]


def _kept(job: JobView, now: float) -> list[Line]:
    fields: list[Line] = []
    if job.checkpoint_step or job.checkpoint:
        fields.append((("checkpoint of step ", "dim"), (f"{job.checkpoint_step:,}", "")))
    if job.cadence is not None:
        every = f"every {count(job.cadence.steps, 'step')}, {seconds(job.cadence.interval_s)}"
        fields.append((("checkpoints ", "dim"), (every, "")))
        fields.append((("one costs ", "dim"), (seconds(job.cadence.cost_s), "")))
    if job.evaluation is not None and (last := job.evaluation.last) is not None:
        found = "not finite" if last.loss is None else loss(last.loss)
        fields.append((("evaluated ", "dim"), (found, ""), (f" after step {last.step:,}", "dim")))
    if job.updates_early:
        taken = f", {job.updates_taken_back:,} taken back"
        fields.append((("updates before all votes ", "dim"), (f"{job.updates_early:,}{taken}", "")))
    fields.append((("handed in ", "dim"), (dated(job.submitted_at, now), "")))
    return fields
