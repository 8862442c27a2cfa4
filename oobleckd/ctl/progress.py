"""What ``get jobs`` and ``describe job`` print of how far a job is and how fast. Owns the words; figures are
the daemon's.
"""

from __future__ import annotations

from oobleckd.protocol.jobviews import JobView, ProgressView, StepTimes
from oobleckd.words import count, many, noun, parameters, rate, seconds, short, short_age

_NOTHING = ProgressView()


def tokens_per_s(job: JobView) -> str:
    """Of late."""
    found = job.progress
    return rate(found.tokens_per_s) if found is not None and found.tokens_per_s else "-"


def elapsed(job: JobView) -> str:
    """Since its first plan ran."""
    return short_age(job.progress.elapsed_s) if job.progress is not None else "-"


def left(job: JobView) -> str:
    """Until its last step."""
    known = job.progress is not None and job.progress.left_s >= 0 and job.finished_at is None
    return short_age(job.progress.left_s) if job.progress is not None and known else "-"


def facts(job: JobView) -> dict[str, str]:
    """For ``describe job``; nothing of a job without a plan."""
    found = job.progress or _NOTHING
    return {
        "progress": _far(job, found) if job.progress is not None else "",
        "tokens": _tokens(found),
        "model": parameters(found.params, found.active_params),
        "throughput": _speed(job, found),
        "MFU": _mfu(found),
        "goodput": f"{found.goodput:.1%} of its devices' time" if found.goodput else "",
        "step time": _step_time(job, found.step_times),
        "slowest device": _slowest(found.step_times),
    }


def share(step: int, steps: int) -> str:
    """``"45%"``: 100 % is said of what is done, and of nothing that is nearly."""
    return f"{100 * step // steps}%"


def _far(job: JobView, found: ProgressView) -> str:
    rest = ""
    if job.finished_at is None:
        rest = f", about {seconds(found.left_s)} left" if found.left_s >= 0 else ", time left not known yet"
    return f"{share(job.step, job.steps)} in {seconds(found.elapsed_s)}{rest}"


def _tokens(found: ProgressView) -> str:
    if not found.total_tokens:
        return ""
    passes = f", {short(found.passes)} {noun(found.passes, 'pass')} over the data" if found.passes else ""
    return f"{many(found.tokens)} of {many(found.total_tokens)}{passes}"


def _speed(job: JobView, found: ProgressView) -> str:
    """Of a job that is over the mean, pauses and recoveries included."""
    words = [f"{rate(found.tokens_per_s)} tokens/s"] if found.tokens_per_s else []
    if job.finished_at is not None:
        return f"{words[0]} in the mean" if words else ""
    return ", ".join(([f"{rate(job.samples_per_s)} samples/s"] if job.samples_per_s else []) + words)


def _mfu(found: ProgressView) -> str:
    if not found.peak_flops or not found.flops_per_token:
        return ""
    done = found.flops_per_token * found.tokens_per_s
    return f"{found.mfu:.1%}: {many(done)}FLOP/s of {many(found.peak_flops)}FLOP/s ({found.peak_of})"


def _step_time(job: JobView, found: StepTimes | None) -> str:
    if found is None:
        return seconds(job.step_s) if job.step_s else ""
    p50, p95, p99, most = map(seconds, (found.p50_s, found.p95_s, found.p99_s, found.max_s))
    of = count(found.count, "step")
    return f"p50 {p50}, p95 {p95}, p99 {p99}, at most {most} (newest {of})"


def _slowest(found: StepTimes | None) -> str:
    if found is None or not found.slowest:
        return ""
    return f"{found.slowest}, {found.slowest_factor:.2f} times its peers' median for its work"
