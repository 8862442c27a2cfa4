"""What ``describe job`` prints of evaluations. Owns the words; answers are the
daemon's.
"""

from __future__ import annotations

from oobleckd.protocol.evalviews import SourceLoss
from oobleckd.protocol.jobeval import Eval
from oobleckd.protocol.jobviews import JobView
from oobleckd.words import count, loss, seconds


def facts(job: JobView) -> dict[str, str]:
    """For ``describe job``: nothing of a job that is not evaluated."""
    found = job.evaluation
    if found is None:
        return {}
    last = found.last
    return {
        "evaluated": ""
        if last is None
        else f"after step {last.step}: {'; '.join(map(_loss, last.losses))}; it took {seconds(last.seconds)}",
        "least loss": "; ".join(f"{each.source} {loss(each.loss)} (step {each.step})" for each in found.best),
        "evaluates": _next(job),
        "evaluations take": _costs(job),
    }


def when_evaluated(table: Eval) -> str:
    """After which steps, as the job says it."""
    parts = [f"every {count(table.every, 'step')}"] if table.every else []
    parts += ["before the first step"] if table.at_start else []
    parts += ["after the last one"] if table.at_end else []
    return ", ".join(parts)


def _loss(found: SourceLoss) -> str:
    if found.loss is None:
        return f"{found.source} not finite"
    perplexity = "infinite" if found.perplexity is None else loss(found.perplexity)
    return f"{found.source} {loss(found.loss)} (perplexity {perplexity})"


def _next(job: JobView) -> str:
    found = job.evaluation
    assert found is not None
    if found.rounds_done:
        return f"now, {found.rounds_done} of {count(found.rounds, 'round')} done"
    if found.next_step < 0:
        return "" if job.finished_at is not None else "not again"
    return f"next after step {found.next_step} ({when_evaluated(job.spec.eval)})"


def _costs(job: JobView) -> str:
    found = job.evaluation
    assert found is not None
    planned = f"{seconds(found.planned_s)} each as planned, {found.planned_share:.1%} of the job's time"
    so_far = f"{found.measured_share:.1%} of the devices' time so far"
    return ", and ".join(([planned] if found.planned_s else []) + ([so_far] if found.last else []))
