"""What the tables of ``get`` and ``describe`` show: the columns of every kind, and the words in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import msgspec

from oobleckd.ctl import progress
from oobleckd.ctl.output import emit_table, since, tolerance, when
from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView, PipelineView, RouterView, ShownStage, StepView, TemplateView
from oobleckd.protocol.nodeviews import NodeView, ranges, together
from oobleckd.protocol.watch import GoodputView, LayerView
from oobleckd.words import layers, loss, plain, rate, seconds, short, size

Shown = TypeVar("Shown", bound=msgspec.Struct)


class Column(NamedTuple, Generic[Shown]):
    """One column: its title and what it says of a row. ``wide``: only of ``-o wide``. ``restless``: it
    changes with the time alone, which is no news.
    """

    title: str
    cell: Callable[[Shown], str]
    wide: bool = False
    restless: bool = False


def table(columns: Sequence[Column[Shown]], rows: Sequence[Shown]) -> None:
    """Print the usual columns of ``rows``."""
    usual = [column for column in columns if not column.wide]
    emit_table([column.title for column in usual], [[column.cell(row) for column in usual] for row in rows])


# --------------------------------------------------------------------------- cells


def job_loss(job: JobView, digits: int) -> str:
    """Of the last step. JSON has no NaN and no infinity: of a step whose loss was one there is none."""
    if job.loss is None:
        return "not finite" if job.skipped_in_row else "-"
    return f"{job.loss:.{digits}f}"


def exact(value: float | None) -> str:
    """As programs would write it; JSON has no NaN and no infinity."""
    return "not finite" if value is None or not math.isfinite(value) else plain(value)


def _figure(value: float | None) -> str:
    return "not finite" if value is None else loss(value)


def _held(node: NodeView) -> str:
    """What it computes, and in brackets what it holds for others."""
    computed, redundant = ranges(node.layers), ranges(node.redundant)
    return f"{computed or '-'} ({redundant})" if redundant else computed or "-"


def _holders(layer: LayerView) -> Sequence[str]:
    """Those with a copy; several that have one between them under one name."""
    return layer.devices if layer.copies == len(layer.devices) else together(layer.devices)


def _stages(pipeline: PipelineView) -> str:
    def words(stage: ShownStage) -> str:
        mode = pipeline.recompute.get(stage.devices[0], "")
        again = in_brackets(f"{mode} again" if mode else "")
        return f"{stage.name}: {layers(stage.start, stage.stop)}{again}{in_brackets(stage.absence)}"

    return ", ".join(map(words, pipeline.shown))


def in_brackets(text: str) -> str:
    """``text`` behind something else; "" where there is none."""
    return f" ({text})" if text else ""


def _split(template: TemplateView) -> str:
    """Of two stages a device the two that it has together."""
    parts = [layers(*stage) for stage in template.stages]
    if template.chunks > 1:
        parts = [f"{one}, {other}" for one, other in zip(parts[: len(parts) // 2], parts[::-1], strict=False)]
    return " | ".join(parts)


# --------------------------------------------------------------------------- rows that are not views


class EvaluatedSource(msgspec.Struct, frozen=True):
    """What an evaluation found on one of its sources."""

    step: int
    at: float
    source: str
    loss: float | None
    perplexity: float | None
    targets: int
    seconds: float


def sources_of(found: EvaluationView) -> tuple[EvaluatedSource, ...]:
    """A row for each source."""
    return tuple(
        EvaluatedSource(found.step, found.at, of.source, of.loss, of.perplexity, of.targets, found.seconds)
        for of in found.losses
    )


class SpentTime(msgspec.Struct, frozen=True):
    """Seconds of a job's devices that went to ``cause``, and their share of all."""

    cause: str
    device_s: float
    share: float | None


def spent(found: GoodputView) -> tuple[SpentTime, ...]:
    """A row for each cause."""
    evaluated = [("evaluation", found.evaluated_s)] if found.evaluated_s else []
    rows = [("useful", found.useful_s), *evaluated, *found.lost_s.items()]
    return tuple(
        SpentTime(cause, took_s, took_s / found.total_s if found.total_s else None) for cause, took_s in rows
    )


# --------------------------------------------------------------------------- tables

JOB: tuple[Column[JobView], ...] = (
    Column("ID", lambda job: job.id),
    Column("NAME", lambda job: job.name),
    Column("STATE", lambda job: job.state),
    Column("STEP", lambda job: f"{job.step}/{job.steps}"),
    Column("SKIPPED", lambda job: str(job.steps_skipped)),
    Column("LOSS", lambda job: job_loss(job, 4)),
    Column("GENERATION", lambda job: str(job.generation), wide=True),
    Column("CAN LOSE", lambda job: tolerance(job.tolerance, job.f)),
    Column("NODES", lambda job: str(len(job.nodes))),
    Column("SAMPLES/S", lambda job: rate(job.samples_per_s), wide=True),
    Column("TOKENS/S", progress.tokens_per_s),
    Column("ELAPSED", progress.elapsed, restless=True),
    Column("ETA", progress.left, restless=True),
    Column("AGE", lambda job: since(job.submitted_at), restless=True),
    Column("POLICY", lambda job: job.policy, wide=True),
    Column("INCIDENTS", lambda job: str(job.incidents), wide=True),
    Column("STEPS LOST", lambda job: str(job.steps_lost), wide=True),
    Column("SUBMITTED", lambda job: when(job.submitted_at, 0), wide=True),
    Column("FINISHED", lambda job: "-" if job.finished_at is None else when(job.finished_at, 0), wide=True),
    Column("CHECKPOINT", lambda job: job.checkpoint or "-", wide=True),
    Column("REASON", lambda job: job.reason),
)

NODE: tuple[Column[NodeView], ...] = (
    Column("NAME", lambda node: node.name),
    Column("STATE", lambda node: node.state),
    Column("KIND", lambda node: ", ".join(sorted(set(node.kinds))) or "-"),
    Column("DEVICES", lambda node: str(len(node.devices))),
    Column("LAYERS", _held),
    Column("HEARTBEAT", lambda node: seconds(node.heartbeat_age_s), restless=True),
    Column("HOST", lambda node: node.host),
    Column("ZONE", lambda node: node.zone or "-"),
    Column("PIDS", lambda node: ", ".join(map(str, node.pids)) or "-", wide=True),
    Column("SPARE", lambda node: node.spare or "-", wide=True),
    Column("INCARNATION", lambda node: node.incarnation, wide=True),
    Column("REASON", lambda node: node.reason),
)

PIPELINE: tuple[Column[PipelineView], ...] = (
    Column("PIPELINE", lambda pipeline: str(pipeline.index)),
    Column("NODES", lambda pipeline: ", ".join(pipeline.nodes)),
    Column("STAGES", _stages),
    Column("MICRO-BATCHES", lambda pipeline: str(len(pipeline.micro_batches))),
)

TEMPLATE: tuple[Column[TemplateView], ...] = (
    Column("NODES", lambda template: str(template.num_nodes)),
    Column("LAYERS", _split),
    Column("FILL", lambda template: seconds(template.fill_s)),
    Column("PERIOD", lambda template: seconds(template.period_s)),
    Column("MEMORY", lambda template: size(max(template.memory_bytes, default=0))),
    Column("INSTANCES", lambda template: str(template.instances)),
)

INCIDENT: tuple[Column[IncidentView], ...] = (
    Column("ID", lambda incident: incident.id),
    Column("AT", lambda incident: when(incident.at)),
    Column("AGE", lambda incident: since(incident.at), restless=True),
    Column("NODES", lambda incident: ", ".join(incident.nodes)),
    Column("CAUSE", lambda incident: incident.cause),
    Column("STEP", lambda incident: str(incident.step)),
    Column("TOOK", lambda incident: "open" if incident.open else seconds(incident.total_s)),
    Column("STEPS LOST", lambda incident: str(incident.steps_lost)),
    Column("JOB", lambda incident: incident.job, wide=True),
    Column("COPIED", lambda incident: size(incident.copied_bytes), wide=True),
    Column("COMMITTED AFTER", lambda incident: seconds(incident.committed_s), wide=True),
    Column("REASON", lambda incident: incident.reason),
)

LAYER: tuple[Column[LayerView], ...] = (
    Column("LAYER", lambda layer: str(layer.layer)),
    Column("COPIES", lambda layer: str(layer.copies)),
    Column("DEVICES", lambda layer: ", ".join(_holders(layer)) or "-"),
)

ROUTER: tuple[Column[RouterView], ...] = (
    Column("LAYER", lambda router: str(router.layer)),
    Column("LOAD", lambda router: short(router.load)),
    Column("IDLE", lambda router: str(router.idle)),
    Column("EXPERTS", lambda router: str(len(router.tokens)) if router.tokens else "-"),
    Column("AUX LOSS", lambda router: _figure(router.aux_loss)),
    Column("Z LOSS", lambda router: _figure(router.z_loss)),
    Column("STEP", lambda router: str(router.step)),
    Column("TOKENS", lambda router: " ".join(map(str, router.tokens)) or "-", wide=True),
)

STEP: tuple[Column[StepView], ...] = (
    Column("STEP", lambda step: str(step.step)),
    Column("AT", lambda step: when(step.at, 0)),
    Column("LOSS", lambda step: exact(step.loss)),
    Column("GRAD NORM", lambda step: exact(step.grad_norm)),
    Column("LR", lambda step: plain(step.lr)),
    Column("SAMPLES", lambda step: str(step.samples)),
    Column("TOOK", lambda step: seconds(step.step_s)),
    Column("OUTCOME", lambda step: f"{step.outcome}: {step.cause}" if step.cause else step.outcome),
    Column("GENERATION", lambda step: str(step.generation), wide=True),
    Column("LEDGER", lambda step: step.ledger, wide=True),
)

EVALUATION: tuple[Column[EvaluatedSource], ...] = (
    Column("STEP", lambda row: str(row.step)),
    Column("AT", lambda row: when(row.at, 0)),
    Column("SOURCE", lambda row: row.source),
    Column("LOSS", lambda row: exact(row.loss)),
    Column("PERPLEXITY", lambda row: exact(row.perplexity)),
    Column("TARGETS", lambda row: f"{row.targets:,}"),
    Column("TOOK", lambda row: seconds(row.seconds)),
)

GOODPUT: tuple[Column[SpentTime], ...] = (
    Column("TIME OF DEVICES", lambda row: row.cause),
    Column("TOOK", lambda row: seconds(row.device_s)),
    Column("SHARE", lambda row: "-" if row.share is None else f"{row.share:.1%}"),
)
