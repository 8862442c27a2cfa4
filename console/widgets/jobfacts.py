"""The job in words: how far, how safe, and whether what it computes is what a run without failures would.
Pure.
"""

from __future__ import annotations

from oobleckd.console.model import ENDED, View
from oobleckd.console.widgets.listing import nothing
from oobleckd.draw import experts
from oobleckd.draw.lines import Line, bar, clipped, flow
from oobleckd.draw.times import dated, minute
from oobleckd.protocol.jobviews import JobView
from oobleckd.words import count, done, loss, many, noun, parameters, rate, seconds, short, why_skipped

DEPENDS = ("job", "link")
ROWS = 5
"""As many lines as it fills where there is room, of most jobs."""


def rows(view: View) -> int:
    """Of this one: a mixture of experts has a line more."""
    return ROWS + bool(view.job is not None and view.job.routers)


def paint(view: View, now: float, width: int, height: int) -> list[Line]:
    """Progress, exactness, checkpoints."""
    job = view.job
    if job is None:
        return nothing((("no job yet: `oobleckctl submit job.toml` hands one in", "dim"),), height)
    lines = [
        *flow(_progress(job, view.clock(now), width), width),
        *flow(_speed(job), width),
        clipped(exactness(job), width),
        *_experts(job, width),
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


def _progress(job: JobView, now: float, width: int) -> list[Line]:
    """How far it is, and when it will be done."""
    share = job.step / job.steps if job.steps else 0.0
    room = max(6, width // 12)
    fields: list[Line] = [
        ((full_name(job), "strong"), (f" {job.state}", "dim")),
        (
            (bar(0.0, share, room).ljust(room) if share else " " * room, "bar"),
            (f" {done(job.step, job.steps, 1)}", "strong"),
        ),
        (("step ", "dim"), (f"{job.step:,}", "strong"), (f" of {job.steps:,}", "dim")),
        *_skipped(job),
    ]
    if (left_s := left_of(job)) >= 0:
        fields.append(
            (("ETA ", "dim"), (seconds(left_s), "strong"), (f" ({minute(now + left_s, now)})", "dim"))
        )
    if job.progress is not None and job.progress.elapsed_s:
        fields.append((("elapsed ", "dim"), (seconds(job.progress.elapsed_s), "")))
    return fields


def full_name(job: JobView) -> str:
    """Its name, and its id where that does not begin with it."""
    return job.id if job.id.startswith(job.name) else f"{job.name} ({job.id})"


def _speed(job: JobView) -> list[Line]:
    """Tokens, and what is made of the hardware."""
    fields: list[Line] = []
    progress = job.progress
    if progress is not None and progress.tokens_per_s:
        fields.append(((rate(progress.tokens_per_s), "strong"), (" tokens/s", "dim")))
        fields += mfu(job)
        if progress.goodput:
            fields.append(
                (("goodput ", "dim"), (f"{progress.goodput:.1%}", "strong"), (" since the start", "dim"))
            )
    if progress is not None and progress.tokens:
        passes = f", {short(progress.passes)} {noun(progress.passes, 'pass')}" if progress.passes else ""
        of = f" of {many(progress.total_tokens)}{passes}" if progress.total_tokens else passes
        fields.append((("tokens ", "dim"), (many(progress.tokens), "strong"), (of, "dim")))
    if progress is not None and (size := parameters(progress.params, progress.active_params)):
        fields.append(((size, ""),))
    if job.samples_per_s:
        fields.append(((rate(job.samples_per_s), "strong"), (" samples/s", "dim")))
        fields.append((("a step ", "dim"), (seconds(job.step_s), "")))
    fields.append((("policy ", "dim"), (job.policy, "")))
    return fields


def mfu(job: JobView) -> list[Line]:
    """The share of the hardware's peak that is used, and by which data sheet, where that is known."""
    if job.progress is None or not job.progress.mfu:
        return []
    of = f" of {job.progress.peak_of}" if job.progress.peak_of else ""
    return [(("MFU ", "dim"), (f"{job.progress.mfu:.1%}", "strong"), (of, "dim"))]


def left_of(job: JobView) -> float:
    """Seconds until the last step, at the pace of late; -1 where that is not known."""
    if job.state in ENDED:
        return -1.0
    if job.progress is not None and job.progress.left_s >= 0:
        return job.progress.left_s
    return (job.steps - job.step) * job.step_s if job.step_s > 0 else -1.0


def _experts(job: JobView, width: int) -> list[Line]:
    """Of a mixture of experts, how evenly tokens go to them: a bar a layer."""
    if not job.routers:
        return []
    words = experts.said(job.routers)
    room = max(4, width - len(f"experts  {words}"))
    drawn = experts.bars(job.routers, min(room, width // 3))
    return [clipped((("experts ", "dim"), (drawn, "bar"), (" ", ""), (words, "")), width)]


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
    fields.append((("submitted ", "dim"), (dated(job.submitted_at, now), "")))
    return fields
