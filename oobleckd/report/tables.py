"""Tables of a report: what is in their cells. Owns the words; how a table looks is the page's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import get_args

import msgspec

from oobleckd.protocol.changes import Change, PlanChosen, PlanDeployed
from oobleckd.protocol.checkpoint import Manifest
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView, Phase
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.jobviews import CurveBin, JobView
from oobleckd.protocol.watch import GoodputView
from oobleckd.report.axes import exact, written
from oobleckd.report.svg import Bar, BarPart
from oobleckd.words import being, count, loss, parameters, rate, seconds, size

PHASES: tuple[Phase, ...] = get_args(Phase)
MOST_ROWS = 200
"""Of a table: the newest are shown, and it says so."""
MOST_BARS = 24
_FEW_FILES = 64


class ReportTable(msgspec.Struct, frozen=True):
    """``caption`` says what it is of. The first cell of a row is its name. ``numbers``: columns of numbers,
    which stand at the right.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()


def day(at: float) -> str:
    """Date and time of day of POSIX seconds (UTC), to the second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def newest(what: str, shown: int, of: int) -> str:
    """What a caption adds where a table has not all."""
    return f" (the newest {shown:,} of {count(of, what)})" if shown < of else ""


# ---------------------------------------------------------------------- the job


def summary(job: JobView, goodput: GoodputView | None) -> list[tuple[str, str]]:
    """What the job is and how far it is: names and values; what nobody knows is left out."""
    progress = job.progress
    kept = goodput.goodput if goodput is not None else 0.0
    best = job.evaluation.best if job.evaluation is not None else ()
    found = {
        "State": f"{job.state}{': ' if job.reason else ''}{job.reason}",
        "Steps": f"{job.step:,} of {job.steps:,}",
        "Loss of the last step": loss(job.loss) if job.loss is not None else "",
        "Least loss evaluated": "; ".join(
            f"{each.source} {loss(each.loss)} (step {each.step:,})" for each in best
        ),
        "Skipped steps": f"{job.steps_skipped:,}" if job.steps_skipped else "",
        "Incidents": f"{job.incidents:,}, {count(job.steps_lost, 'step')} lost",
        "Goodput": f"{kept:.1%} of its devices' time" if kept else "",
        "Step time": f"{seconds(job.step_s)} (median of late)" if job.step_s else "",
        "Policy": f"{job.policy}, f = {job.f}",
        "Nodes": f"{len(job.nodes)} now" if job.nodes else "",
        "Submitted": day(job.submitted_at),
        "Finished": day(job.finished_at) if job.finished_at is not None else "",
    }
    if progress is not None:
        found |= {
            "Elapsed": seconds(progress.elapsed_s) if progress.elapsed_s else "",
            "Left": seconds(progress.left_s) if progress.left_s > 0 else "",
            "Tokens seen": f"{progress.tokens:,} of {progress.total_tokens:,}" if progress.tokens else "",
            "Model": parameters(progress.params, progress.active_params),
            "Throughput": f"{rate(progress.tokens_per_s)} tokens/s" if progress.tokens_per_s else "",
            "MFU": f"{progress.mfu:.1%} ({progress.peak_of})" if progress.mfu else "",
        }
    return [(name, value) for name, value in found.items() if value]


def headline(job: JobView) -> str:
    """One sentence of the job."""
    incidents = f"{count(job.incidents, 'incident')}, {count(job.steps_lost, 'step')} lost"
    return f"{job.id} {being(job.state)} at step {job.step:,} of {job.steps:,}; {incidents}."


# ---------------------------------------------------------------------- incidents


def incident_bars(incidents: Sequence[IncidentView]) -> list[Bar]:
    """A bar of each of the newest, of its phases, in seconds from the first evidence."""
    return [
        Bar(
            each.id,
            tuple(
                BarPart(
                    phase.phase, phase.start_s, phase.start_s + phase.duration_s,
                    f"{each.id}, {phase.phase}: {seconds(phase.duration_s)}",
                )
                for phase in each.phases
            ),
            "open" if each.open else seconds(each.total_s),
        )
        for each in incidents[-MOST_BARS:]
    ]  # fmt: skip


def incident_table(incidents: Sequence[IncidentView]) -> ReportTable:
    """When, who, why, what was done."""
    shown = incidents[-MOST_ROWS:]
    return ReportTable(
        f"What was lost, and what was done{newest('incident', len(shown), len(incidents))}",
        ("Incident", "At (UTC)", "Step", "Nodes", "Cause", "What was done", "Took", "Steps lost", "Copied"),
        tuple(
            (
                each.id, day(each.at), f"{each.step:,}", ", ".join(each.nodes), each.cause,
                each.reason or "-", "open" if each.open else seconds(each.total_s), f"{each.steps_lost:,}",
                size(each.copied_bytes),
            )
            for each in shown
        ),
        frozenset({2, 6, 7, 8}),
    )  # fmt: skip


def phase_table(incidents: Sequence[IncidentView]) -> ReportTable:
    """The numbers of the bars."""
    shown = incidents[-MOST_ROWS:]
    rows = []
    for each in shown:
        spent = dict.fromkeys(PHASES, 0.0)
        for phase in each.phases:
            spent[phase.phase] += phase.duration_s
        committed = seconds(each.committed_s) if each.committed_s else "-"
        rows.append((each.id, *(seconds(spent[phase]) for phase in PHASES), seconds(each.total_s), committed))
    return ReportTable(
        "Time of each phase, and until the interrupted step was committed",
        ("Incident", *(phase.capitalize() for phase in PHASES), "All", "Step committed after"),
        tuple(rows),
        frozenset(range(1, len(PHASES) + 3)),
    )


def rejected_table(incidents: Sequence[IncidentView]) -> ReportTable:
    """What could have been done instead, and what it would have cost."""
    rows = []
    for each in incidents[-MOST_ROWS:]:
        if each.rejected:
            rows.append((each.id, "taken", each.parts.plan or each.reason, seconds(each.cost_s), ""))
        rows += [
            (
                each.id,
                "not taken",
                way.what,
                f"{'at least ' if way.at_least else ''}{seconds(way.cost_s)}",
                way.why,
            )
            for way in each.rejected
        ]
    return ReportTable(
        "Ways that the policy compared, by their modelled cost until the next loss is expected",
        ("Incident", "", "Way", "Modelled cost", "Why not"),
        tuple(rows),
        frozenset({3}),
    )


# ---------------------------------------------------------------------- plans and time


def plan_table(story: Sequence[Change]) -> ReportTable:
    """The plans that were in force, each with why it was chosen."""
    rows, why = [], ""
    for change in story:
        if isinstance(change.data, PlanChosen) and not change.data.stays:
            why = change.data.reason
        elif isinstance(change.data, PlanDeployed):
            plan, why_now = change.data, why
            pipelines = "; ".join(" + ".join(nodes) for nodes in plan.pipelines)
            copied = size(plan.copied_bytes) if plan.copied_bytes else "-"
            rows.append((str(plan.generation), day(change.at), pipelines, copied, why_now or "-"))
            why = ""
    shown = rows[-MOST_ROWS:]
    return ReportTable(
        f"Plans that were in force, as far as events are kept{newest('plan', len(shown), len(rows))}",
        ("Generation", "From (UTC)", "Pipelines (nodes)", "Copied", "Why"),
        tuple(shown),
        frozenset({0, 3}),
    )


def time_parts(goodput: GoodputView) -> list[tuple[str, float]]:
    """What the devices' time went to: a cause and its device-seconds, without those of no time."""
    parts = [("useful", goodput.useful_s), ("evaluated", goodput.evaluated_s), *goodput.lost_s.items()]
    return [(name, spent_s) for name, spent_s in parts if spent_s > 0.0]


def time_bar(goodput: GoodputView) -> Bar:
    """All of it in one bar, in shares."""
    parts, at = [], 0.0
    for name, spent_s in time_parts(goodput):
        share = spent_s / goodput.total_s
        parts.append(BarPart(name, at, at + share, f"{name}: {share:.1%}"))
        at += share
    return Bar("time", tuple(parts), "")


def time_table(goodput: GoodputView) -> ReportTable:
    """The numbers of the bar."""
    rows = [
        (name, seconds(spent_s), f"{spent_s / goodput.total_s:.2%}") for name, spent_s in time_parts(goodput)
    ]
    return ReportTable(
        "Device time since the first plan was in force",
        ("Went to", "Device time", "Share"),
        (*rows, ("all", seconds(goodput.total_s), "100%")),
        frozenset({1, 2}),
    )


# ---------------------------------------------------------------------- curves and evaluations


def bin_table(bins: Sequence[CurveBin]) -> ReportTable:
    """The numbers of the curves."""
    return ReportTable(
        "Curves by bins of steps: mean, and from the least to the highest",
        ("Steps", "Loss", "Least to highest", "Learning rate", "Gradient norm", "Tokens/s", "Skipped"),
        tuple(
            (
                f"{each.first:,}" if each.first == each.last else f"{each.first:,} to {each.last:,}",
                exact(each.loss_mean), f"{exact(each.loss_min)} to {exact(each.loss_max)}", written(each.lr),
                exact(each.grad_norm), rate(each.tokens_per_s) if each.tokens_per_s else "-",
                f"{each.skipped:,}",
            )
            for each in bins
        ),
        frozenset(range(1, 7)),
    )  # fmt: skip


def evaluation_table(evaluations: Sequence[EvaluationView], of: int) -> ReportTable:
    """Loss and perplexity of each source."""
    shown = evaluations[-MOST_ROWS:]
    return ReportTable(
        f"Loss and perplexity of each source{newest('evaluation', len(shown), of)}",
        ("After step", "At (UTC)", "Source", "Loss", "Perplexity", "Targets", "Took"),
        tuple(
            (
                f"{each.step:,}", day(each.at), source.source, exact(source.loss), exact(source.perplexity),
                f"{source.targets:,}", seconds(each.seconds),
            )
            for each in shown
            for source in each.losses
        ),
        frozenset({0, 3, 4, 5, 6}),
    )  # fmt: skip


# ---------------------------------------------------------------------- environment and digests


def environment_table(kinds: Sequence[dict[str, str]]) -> ReportTable:
    """What decides the bits of those that trained it, by name."""
    names = {name: None for kind in kinds for name in kind}
    return ReportTable(
        "Devices that trained it, those that are alike once",
        ("Trait", *(f"Kind {number}" for number in range(1, len(kinds) + 1))),
        tuple((name, *(kind.get(name, "none") for kind in kinds)) for name in names),
    )


def inputs_table(inputs: Inputs) -> ReportTable:
    """What it reads, by its identity."""
    return ReportTable(
        "What the job reads",
        ("Kind", "Place", "Files", "Size", "Digest"),
        tuple(
            (each.kind, each.place, f"{each.files:,}", size(each.num_bytes), each.known or "not known")
            for each in inputs
        ),
        frozenset({2, 3}),
    )


def checkpoint_table(manifest: Manifest) -> ReportTable:
    """The files of its last checkpoint."""
    shown = manifest.buckets[:_FEW_FILES]
    more = (
        f" (the first {len(shown)} of {len(manifest.buckets):,})"
        if len(shown) < len(manifest.buckets)
        else ""
    )
    return ReportTable(
        f"Files of its last checkpoint, of step {manifest.counters.step:,}{more}",
        ("File", "Size", "SHA-256"),
        tuple((each.file, size(each.num_bytes), each.sha256) for each in shown),
        frozenset({1}),
    )


def named(pairs: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Those that have a value."""
    return tuple((name, value) for name, value in pairs if value)
