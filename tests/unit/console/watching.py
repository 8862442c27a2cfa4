"""Answers beyond the lists, for the cluster of ``build``: a step with a dead device, its model, layers,
goodput, a past.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from oobleckd.console.facts import AnyFact, Watched
from oobleckd.protocol.evalviews import EvaluationView, SourceLoss
from oobleckd.protocol.incidentviews import IncidentView, RejectedView
from oobleckd.protocol.jobviews import CurveBin
from oobleckd.protocol.watch import (
    Bundle,
    CurveView,
    GoodputView,
    ImpactView,
    LaneView,
    LayerView,
    OpView,
    Past,
    SampledSteps,
    ScheduleView,
    Snapshot,
)
from tests.helpers.api_server import status_view
from tests.unit.console import build
from tests.unit.console.build import NOW


def lane(device: str, pipeline: int, stage: int, ops: tuple[OpView, ...], **changes: Any) -> LaneView:
    return LaneView(device, pipeline, (stage,), ops, **({"bubble": 0.25} | changes))


def ops(stage: int, *, first: float = 0.0, count: int = 3, origin: str = "") -> tuple[OpView, ...]:
    """Forwards, then backwards, a tenth of a second each; a micro-batch is re-routed where there is an
    ``origin``.
    """
    forward = [OpView("F", stage, n, first + n / 10, first + (n + 1) / 10) for n in range(count)]
    back = [
        OpView(
            "B",
            stage,
            n,
            first + (count + n) / 10,
            first + (count + n + 1) / 10,
            origin if n == count - 1 else "",
        )
        for n in range(count)
    ]
    end = first + 2 * count / 10
    return (*forward, *back, OpView("U", -1, -1, end, end + 0.1, early=stage == 0))


def schedule(step: int = 20, **changes: Any) -> ScheduleView:
    """Of two pipelines of two stages; node-5 died after two forwards, and node-2 does one of its
    micro-batches.
    """
    dead = (OpView("F", 1, 0, 0.1, 0.2), OpView("F", 1, 1, 0.2, 0.3))
    lanes = (
        lane("node-1/0", 0, 0, ops(0)),
        lane("node-2/0", 0, 1, ops(1, first=0.1, origin="node-5/0")),
        lane("node-3/0", 1, 0, ops(0)),
        lane("node-5/0", 1, 1, dead, dead=True, bubble=0.8),
    )
    usual: dict[str, Any] = {
        "job": "job-1", "step": step, "epoch": 3, "at": NOW - 30.0 + step, "measured": True, "span_s": 1.0,
        "lanes": lanes,
    }  # fmt: skip
    return ScheduleView(**(usual | changes))


def modelled() -> ScheduleView:
    lanes = (
        lane("node-1/0", 0, 0, ops(0)),
        lane("node-2/0", 0, 1, ops(1, first=0.2)),
        lane("node-3/0", 1, 0, ops(0)),
    )
    return schedule(0, measured=False, span_s=0.9, lanes=lanes)


def layers() -> tuple[LayerView, ...]:
    held = [("node-1/0", "node-3/0") if layer < 5 else ("node-2/0", "node-5/0") for layer in range(9)]
    return (
        *(LayerView(layer, 2, devices) for layer, devices in enumerate(held)),
        LayerView(9, 1, ("node-2/0",)),
    )


def goodput(**changes: Any) -> GoodputView:
    lost = {"detect": 10.0, "plan": 1.0, "reconfigure": 9.0, "copy": 30.0, "redone": 0.0, "bubble": 150.0,
        "degraded": 0.0,
            "waiting": 0.0}  # fmt: skip
    usual: dict[str, Any] = {
        "job": "job-1", "total_s": 1000.0, "useful_s": 800.0, "lost_s": lost, "of_fault_free": 0.8,
        "step_s": 0.5, "best_step_s": 0.4, "best_at": NOW - 3600.0, "plan_step_s": 1.0,
        "best_plan_step_s": 0.5, "best_plan_nodes": 6,
    }  # fmt: skip
    return GoodputView(**(usual | changes))


def curve(num_bins: int, *, first: int = 1, skipped: int = 0) -> CurveView:
    """A million steps whose losses fall from 10 to 1, with a peak of 12 now and then; the last bin has those
    that were skipped.
    """
    bins = []
    for number in range(num_bins):
        mean = 10.0 - 9.0 * (number + 1) / num_bins
        begin, end = first + 10**6 * number // num_bins, first + 10**6 * (number + 1) // num_bins - 1
        most = 12.0 if number % 10 == 0 else mean
        bins.append(CurveBin(begin, end, end - begin + 1, 0, mean, mean, most, 0.5, 0.5, 0.5, 0.1, 1.0))
    bins[-1] = msgspec.structs.replace(bins[-1], skipped=skipped)
    return CurveView("job-1", 10**6, tuple(bins))


EVALUATIONS = tuple(
    EvaluationView(
        step=step,
        loss=mean,
        losses=(SourceLoss("held-out", mean, mean.hex(), 100.0, 64),),
        epoch=2,
        at=NOW - 60.0 + step,
        seconds=0.5,
    )
    for step, mean in ((10, 5.5), (20, 4.25))
)


def impact(*nodes: str, **changes: Any) -> ImpactView:
    usual: dict[str, Any] = {
        "job": "job-1", "nodes": nodes, "lost_layers": (), "steps_back": 0, "stops": False, "stall_s": 2.0,
        "throughput": 0.75, "copied_bytes": 5 << 20, "copy_s": 0.5, "can_lose": 0,
        "plan": build.PIPELINES[:1],
        "reason": "shrink: the others go on", "rejected": (RejectedView("wait", 30.0, "too long"),),
    }  # fmt: skip
    return ImpactView(**(usual | changes))


def watched(**changes: Any) -> Watched:
    usual: dict[str, Any] = {
        "schedules": SampledSteps("job-1", (10, 15, 20)), "schedule": schedule(), "modelled": modelled(),
        "layers": layers(), "goodput": goodput(), "impact": impact("node-2"),
    }  # fmt: skip
    return Watched(NOW, **(usual | changes))


def facts() -> tuple[AnyFact, ...]:
    """All that a console can know."""
    return (*build.facts(), watched())


def opened() -> IncidentView:
    return build.incident(
        id="inc-2", open=True, at=NOW - 40.0, phases=(), total_s=0.0, reason="", nodes=("node-5",)
    )


def past(begins: float = NOW - 3600.0) -> Past:
    """A minute before ``NOW``: two steps, the loss of node-5 and its recovery, another two steps."""
    start = NOW - 60.0
    told = [
        build.step_change(11, 21), build.change(12, "node", "node-5 lost: signal 9", level="warn",
        node="node-5"),
        build.change(13, "incident", "inc-2: node-5: signal 9", level="warn", incident="inc-2",
        nodes=["node-5"], epoch=4),
        build.change(14, "incident", "inc-2: recovered in 3.000 s", incident="inc-2",
                     view=build.incident(id="inc-2", at=start + 20.0, nodes=("node-5",))),
        build.step_change(15, 22, epoch=4),
    ]  # fmt: skip
    times = [start + 10.0, start + 20.0, start + 20.5, start + 23.0, start + 30.0]
    changes = tuple(msgspec.structs.replace(each, at=at) for each, at in zip(told, times, strict=True))
    snapshot = Snapshot(
        start, 10, status_view(Path("state")), (build.job(),), build.nodes(), build.PIPELINES,
        build.templates(),
        (build.incident(),), layers(),
    )  # fmt: skip
    return Past(begins, NOW, snapshot, changes, (schedule(20, at=start + 1.0), schedule(22, at=start + 31.0)))


def bundle(**changes: Any) -> Bundle:
    known = past()
    usual: dict[str, Any] = {
        "version": 1, "made_by": "oobleckd 0.1.0", "past": known,
        "incident": build.incident(id="inc-2", at=known.snapshot.at + 20.0, nodes=("node-5",)),
    }  # fmt: skip
    return Bundle(**(usual | changes))
