"""What ``get evaluations`` and ``describe job`` print of evaluations. Owns the words; answers are the
daemon's.
"""

from __future__ import annotations

from oobleckd.client import Client
from oobleckd.ctl.connect import wants_json
from oobleckd.ctl.output import emit_items, emit_table, when
from oobleckd.protocol.api import JobView, SourceLoss
from oobleckd.protocol.jobeval import Eval
from oobleckd.words import count, loss, plain, seconds

_FEW = 20  # where nobody says how many


def get_evaluations(client: Client, job: str, since: int | None, last: int | None) -> None:
    """Those of ``job``: from that after ``since`` steps on, the ``last`` ones; a line for each source."""
    if since is None and last is None:
        last = _FEW
    found = client.evaluations(job, since or 0, last=last)
    if wants_json():
        emit_items("Evaluation", found)
        return
    emit_table(
        ("STEP", "AT", "SOURCE", "LOSS", "PERPLEXITY", "TARGETS", "TOOK"),
        [
            (
                str(each.step), when(each.at, 0), of.source, _exact(of.loss), _exact(of.perplexity),
                f"{of.targets:,}", seconds(each.seconds),
            )
            for each in found
            for of in each.losses
        ],
    )  # fmt: skip


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


def _exact(value: float | None) -> str:
    """As programs would write it; JSON has no NaN and no infinity."""
    return "not finite" if value is None else plain(value)
