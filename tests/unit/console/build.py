"""Facts as a running cluster makes them: five nodes, two pipelines, one incident that is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from oobleckd.console.facts import ChangesHeard, Fetched, PastHistory
from oobleckd.protocol.changes import Change
from oobleckd.protocol.incidentviews import IncidentView, PhaseView
from oobleckd.protocol.jobviews import JobView, PipelineView, StepView, TemplateView
from oobleckd.protocol.nodeviews import LayerRange, NodeView
from tests.helpers.api_server import job_spec, job_view, node_view, status_view

NOW = 1_000_000.0
REASON = "shrink: node-3 and node-5 go on without node-4; can lose 1"


def job(**changes: Any) -> JobView:
    spec = job_spec(
        train={"steps": 500, "global_batch": 12, "micro_batch": 1, "sequence": 8},
        fault_tolerance={"f": 1, "policy": "oobleck"},
    )
    usual = {
        "spec": spec, "state": "running", "step": 20, "steps": 500, "epoch": 3, "loss": 2.5, "tolerance": 1,
        "f": 1,
        "samples_per_s": 24.0, "step_s": 0.5, "incidents": 1, "finished_at": None,
    }  # fmt: skip
    return job_view(**(usual | changes))


def pipeline(
    index: int, nodes: tuple[str, ...], micro_batches: tuple[int, ...], layers: int = 10
) -> PipelineView:
    cuts = [layers * i // len(nodes) for i in range(len(nodes) + 1)]
    stages = tuple(LayerRange(f"{node}/0", cuts[i], cuts[i + 1]) for i, node in enumerate(nodes))
    return PipelineView(index, nodes, stages, micro_batches)


PIPELINES = (
    pipeline(0, ("node-1", "node-2"), (0, 1, 2, 3, 4, 5)),
    pipeline(1, ("node-3", "node-5"), (6, 7, 8, 9, 10, 11)),
)


def nodes() -> tuple[NodeView, ...]:
    held = {stage.device.split("/")[0]: stage for line in PIPELINES for stage in line.stages}
    up = [node_view(name, layers=(stage,)) for name, stage in held.items()]
    return (*up, node_view("node-4", state="lost", reason="signal 9"))


def incident(**changes: Any) -> IncidentView:
    usual: dict[str, Any] = {
        "id": "inc-1", "job": "job-1", "cause": "node-4: signal 9", "nodes": ("node-4",), "at": NOW - 60.0,
        "epoch": 2,
        "step": 7, "open": False, "total_s": 2.0, "reason": REASON, "copied_bytes": 3 << 20,
        "layer_gradients": 46,
        "step_layer_gradients": 120, "committed_s": 0.5,
        "phases": (
            PhaseView("detect", 0.0, 0.2), PhaseView("plan", 0.2, 0.05), PhaseView("reconfigure", 0.25, 0.75),
            PhaseView("copy", 1.0, 0.4), PhaseView("resume", 1.4, 0.6),
        ),
    }  # fmt: skip
    return IncidentView(**(usual | changes))


def templates(most: int = 4) -> tuple[TemplateView, ...]:
    return tuple(
        TemplateView(n, tuple((i, i + 1) for i in range(n)), 0.1 * n, 0.1, (1 << 20,) * n, 2 if n == 2 else 0)
        for n in range(2, most + 1)
    )


def step(number: int, *, loss: float = 2.5, at: float | None = None) -> StepView:
    at = NOW - 10.0 + number / 2 if at is None else at
    return StepView(number, loss, loss.hex(), 1.0, 1e-3, 12, "full", "applied", 3, at)


def change(seq: int, kind: str, text: str, *, level: str = "info", **data: object) -> Change:
    raw = msgspec.Raw(msgspec.json.encode(data))
    return Change(seq, NOW - 5.0 + seq / 100, kind, level, text, (), raw)  # type: ignore[arg-type]


def step_change(
    seq: int,
    number: int,
    *,
    epoch: int = 3,
    loss: float = 2.0,
    job_id: str = "job-1",
    outcome: str = "applied",
) -> Change:
    data = {"job": job_id, "step": number, "loss": loss, "outcome": outcome, "epoch": epoch}
    return change(seq, "step", f"{job_id}: step {number}", **data)


def fetched(**changes: Any) -> Fetched:
    usual: dict[str, Any] = {
        "status": status_view(Path("state")), "jobs": (job(),), "nodes": nodes(), "pipelines": PIPELINES,
        "templates": templates(), "incidents": (incident(),),
    }  # fmt: skip
    return Fetched(changes.pop("at", NOW), **(usual | changes))


def history(last: int = 20) -> PastHistory:
    return PastHistory(NOW, "job-1", tuple(step(number) for number in range(1, last + 1)))


def heard(told: Change) -> ChangesHeard:
    return ChangesHeard(NOW, told)


def facts() -> tuple[Fetched | PastHistory | ChangesHeard, ...]:
    """All that a console learns at its start."""
    told = (
        change(1, "node", "node-4 lost: signal 9", level="warn"),
        change(2, "plan", f"job-1: {REASON}"),
        change(3, "incident", "inc-1: recovered in 2.000 s", view=incident()),
    )
    return (fetched(), history(), *map(heard, told))
