"""How far a job is, and how fast: what people see at a glance (``ProgressView``).

Pure, and from the journal's facts but for the slowest device, so a restarted daemon goes on with the same
figures. Owns the arithmetic; FLOPs are ``planner.costs.flops``', the share of useful time ``goodput``'s.
What changes with a step at most is found once for all who ask (``Figures``): they ask often.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePosixPath

from oobleckd.core import room, watching
from oobleckd.core.context import Core
from oobleckd.core.figures import KnownModel, KnownTimes
from oobleckd.core.state import JobRecord
from oobleckd.planner.costs import flops
from oobleckd.planner.costs.devices import DeviceSheet, sheet_of
from oobleckd.protocol.evalviews import EvalSummary
from oobleckd.protocol.jobviews import ProgressView, StepTimes
from oobleckd.protocol.traits import KIND

TIMED_STEPS = 1000
"""The newest, of which quantiles and histogram are: the last percent of them is ten steps."""
_BINS = 16


def progress_of(
    core: Core, job: JobRecord, step_s: float, evaluation: EvalSummary | None
) -> ProgressView | None:
    """Of ``job``, whose steps take ``step_s`` of late (0: nobody knows yet), and which is evaluated so; None
    before its first plan.
    """
    if job.deployed_at is None:
        return None
    until = core.now if job.finished_at is None else job.finished_at
    elapsed_s = max(0.0, until - job.deployed_at)
    before, spec = _tokens_at_start(core, job), job.spec
    own = spec.tokens_before(job.counters.step) - spec.tokens_before(job.start.step)
    each = newest_batch(job) * spec.train.sequence
    tokens_per_s = _rate(own, elapsed_s) if job.final else each / step_s if step_s else 0.0
    model = _model(core, job)
    peak_flops, peak_of = _peak(core, job, elapsed_s)
    return ProgressView(
        elapsed_s=elapsed_s,
        left_s=time_left_s(job, step_s, evaluation),
        tokens=before + own,
        total_tokens=before + spec.tokens_before(spec.train.steps) - spec.tokens_before(job.start.step),
        passes=_passes(job, before + own),
        tokens_per_s=tokens_per_s,
        flops_per_token=model.flops_per_token,
        peak_flops=peak_flops,
        peak_of=peak_of,
        mfu=model.flops_per_token * tokens_per_s / peak_flops if peak_flops else 0.0,
        # Bubbles are not taken off: that of a daemon that restarts is not known before a step is told.
        # (D-progress-004)
        goodput=watching.goodput_view(core, job).goodput,
        step_times=_step_times(core, job),
        params=model.params,
        active_params=model.active,
    )


def _rate(amount: float, elapsed_s: float) -> float:
    """The mean rate of a job that is over."""
    return max(0.0, amount / elapsed_s) if elapsed_s else 0.0


# ---------------------------------------------------------------------- time


def time_left_s(job: JobRecord, step_s: float, evaluation: EvalSummary | None) -> float:
    """Until the last step and the evaluation behind it, -1 where nothing tells."""
    if job.final:
        return 0.0 if job.state == "done" else -1.0
    sizes = job.spec.batch_sizes
    # In steps of the newest size: larger ones to come take longer, by about as much as they are larger.
    num_steps = max(0, sizes.before(job.spec.train.steps) - sizes.before(job.counters.step)) / newest_batch(
        job
    )
    if num_steps and not step_s:
        return -1.0
    return num_steps * step_s + _evaluating_s(job, step_s, evaluation)


def _evaluating_s(job: JobRecord, step_s: float, evaluation: EvalSummary | None) -> float:
    """What evaluations still take: each as the last one did, or before there was one as it is planned beside
    a step.
    """
    if evaluation is None:
        return 0.0
    if evaluation.last is not None:
        each_s = evaluation.last.seconds
    else:
        planned_step_s = job.plan.step_s if job.plan is not None else 0.0
        each_s = evaluation.planned_s * step_s / planned_step_s if planned_step_s else evaluation.planned_s
    num_left = job.spec.eval_rounds.num_left(job.counters)
    return max(0.0, num_left * each_s - job.evaluations.partial_s)


def _step_times(core: Core, job: JobRecord) -> StepTimes | None:
    """Of the newest steps in memory; None where there is none (of a job that is over, but for the last)."""
    steps = job.steps
    if not steps or (job.final and len(steps) < 2):
        return None
    slowest = core.run.paces.slowest() if core.run is not None and core.run.job is job else ("", 0.0)
    known = core.figures.times.get(job.id)
    if known is None or known.newest is not steps[-1] or known.slowest != slowest:
        times_s = sorted(step.step_s for step in steps[-TIMED_STEPS:])
        known = core.figures.times[job.id] = KnownTimes(steps[-1], slowest, step_times(times_s, *slowest))
    return known.times


def step_times(ordered_s: Sequence[float], slowest: str = "", factor: float = 0.0) -> StepTimes:
    """Quantiles and histogram of seconds in ascending order, one at least. A quantile is the least of them
    that so many are not above; edges go from the least to the most in equal ratios.
    """
    edges_s = _edges(ordered_s[0], ordered_s[-1])
    within = [bisect_right(ordered_s, edge_s) for edge_s in edges_s]
    return StepTimes(
        count=len(ordered_s),
        p50_s=_quantile(ordered_s, 50),
        p95_s=_quantile(ordered_s, 95),
        p99_s=_quantile(ordered_s, 99),
        max_s=ordered_s[-1],
        edges_s=edges_s,
        counts=tuple(now - before for before, now in zip((0, *within), within, strict=False)),
        slowest=slowest,
        slowest_factor=factor,
    )


def _quantile(ordered: Sequence[float], percent: int) -> float:
    return ordered[-(-len(ordered) * percent // 100) - 1]


def _edges(least: float, most: float) -> tuple[float, ...]:
    """The last is ``most`` itself."""
    # Steps hardly differ as a rule: edges that fit all jobs would put all into one or two bins.
    # (D-progress-002)
    if least <= 0 or most <= least:
        return (most,)
    inner = {least * (most / least) ** (place / _BINS) for place in range(1, _BINS)}
    return (*sorted(edge for edge in inner if edge < most), most)


# ---------------------------------------------------------------------- tokens


def newest_batch(job: JobRecord) -> int:
    """Sequences of the newest step that is committed, or of the first."""
    return job.spec.batch_sizes.size(max(0, job.counters.step - 1))


def _tokens_at_start(core: Core, job: JobRecord) -> int:
    """Of the steps in the checkpoint that it was resumed from: as long as those of the job that wrote it, as
    far as this daemon knows that, else as its own.
    """
    tokens, later = 0, job
    while later.start.step:
        writer = _writer(core, later)
        if writer is None or writer.start.step > later.start.step:
            return tokens + later.spec.tokens_before(later.start.step)
        tokens += writer.spec.tokens_before(later.start.step) - writer.spec.tokens_before(writer.start.step)
        later = writer
    return tokens


def _writer(core: Core, job: JobRecord) -> JobRecord | None:
    """The job whose folder has the checkpoint that ``job`` began from: one that was submitted before it."""
    folder = PurePosixPath(job.origin).parent
    found = core.state.jobs.get(folder.name)
    if found is None or found is job or found.submitted_at >= job.submitted_at:
        return None
    return found if str(folder) == room.folder(core, found) else None


def _passes(job: JobRecord, tokens: int) -> float:
    """Over the job's data, as far as its devices said how many tokens that has."""
    of_data = next((each.tokens for each in job.inputs if each.kind == "data"), 0)
    return tokens / of_data if of_data else 0.0


# ---------------------------------------------------------------------- FLOPs


def _model(core: Core, job: JobRecord) -> KnownModel:
    """Of a job that is over and planned no more as it was last known."""
    if job.id not in core.figures.models and job.setup is not None:
        found = job.setup.profile
        core.figures.models[job.id] = KnownModel(flops.of_profile(found), found.params, found.active_params)
    return core.figures.models.get(job.id, KnownModel())


def _peak(core: Core, job: JobRecord, elapsed_s: float) -> tuple[float, str]:
    """FLOPs a second of all its cards, and of which data sheet; of a job that is over, of as many as it had
    in the mean. (0, "") where one of them has no sheet.
    """
    models = sorted({traits.get(KIND, "") for traits in job.kinds})
    sheets = {model: sheet for model in models if (sheet := sheet_of(model)) is not None}
    if not sheets or len(sheets) < len(models):
        return 0.0, ""
    precision = job.spec.train.precision
    if len({sheet.name for sheet in sheets.values()}) > 1:
        return _mixed_peak(core, job, sheets)
    sheet = next(iter(sheets.values()))
    of = f"{sheet.name}, {precision}"
    parts = _part_of_each(core, job)
    cards = _rate(job.book.total_s, elapsed_s) * _mean(parts) if job.final else sum(parts)
    return (sheet.peak(precision) * cards, of) if cards else (0.0, "")


def _part_of_each(core: Core, job: JobRecord) -> list[float]:
    """Of each device of the layout in force, or of the last one, the part of a card that is its own."""
    # Devices that share a card share its peak: of four on one card each counted a whole one, and MFU was a
    # quarter of what it is. (D-progress-005)
    names = [_card_of(core, device) for device in job.survivors()]
    shared = Counter(names)
    return [1 / shared[name] for name in names]


def _card_of(core: Core, device: str) -> str:
    """The UUID of its card; its own name where that is not known."""
    info = core.members.device(device)
    return device if info is None else info.card or device


def _mean(parts: Sequence[float]) -> float:
    """1 where there are none."""
    return sum(parts) / len(parts) if parts else 1.0


def _mixed_peak(core: Core, job: JobRecord, sheets: dict[str, DeviceSheet]) -> tuple[float, str]:
    """Of devices of several kinds, each by its own card. When a job is over nobody knows any more how long it
    had which.
    """
    peak, names, precision = 0.0, set[str](), job.spec.train.precision
    for device, part in () if job.final else zip(job.survivors(), _part_of_each(core, job), strict=True):
        info = core.members.device(device)
        sheet = sheets.get(info.all_traits.get(KIND, "")) if info is not None else None
        if sheet is None:
            return 0.0, ""
        peak += part * sheet.peak(precision)
        names.add(sheet.name)
    return (peak, f"{' and '.join(sorted(names))}, {precision}") if names else (0.0, "")
