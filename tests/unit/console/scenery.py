"""Parts of scenes: changes, incidents, plans after a loss, and all that a console is told of a cluster at a
moment.

The cluster is ``fleet``'s; which parts make a scene is ``scenes``'.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from oobleckd import __version__
from oobleckd.console.facts import AnyFact, ChangesHeard, Fetched, PastHistory, Watched
from oobleckd.console.model import View, fold
from oobleckd.console.widgets.impact import candidates
from oobleckd.protocol.api import Status
from oobleckd.protocol.changes import Change
from oobleckd.protocol.incidentviews import IncidentView, Phase, PhaseView, RejectedView, SourceView
from oobleckd.protocol.jobviews import JobState, JobView, PipelineView, TemplateView
from oobleckd.protocol.nodeviews import LayerRange, NodeState, NodeView
from oobleckd.protocol.watch import ImpactView, LayerView, SampledSteps, ScheduleView
from tests.helpers.api_server import status_view
from tests.helpers.fleet import JOB, Fleet

NOW = datetime(2026, 11, 22, 12, 4, 31, tzinfo=UTC).timestamp()
BEST_AT = NOW - 5_400.0
STEP = 12_480
FLEET = Fleet((4, 4, 3), standby=1)
DEAD = "n006"  # stage 2 of pipeline 1
SPARE = "n011"
COPIED = 3_328_599_654
MARKED = ("n002", "n005")


# --------------------------------------------------------------------------- what happened


def change(
    seq: int, ago_s: float, kind: str, text: str, *keys: str, level: str = "info", **data: object
) -> Change:
    """One that was ``ago_s`` seconds ago; ``keys`` of its story."""
    raw = msgspec.Raw(msgspec.json.encode(data))
    return Change(seq, NOW - ago_s, kind, level, text, keys, raw)  # type: ignore[arg-type]


def old_events() -> tuple[Change, ...]:
    """Of the hour before."""
    of_job, of_node, of_incident = f"job:{JOB}", "node:n009", "incident:inc-41"
    return (
        change(8_101, 2_710.0, "checkpoint", f"{JOB}: step 12,200 is in ckpt/gpt2-xl/step-12200", of_job),
        change(8_344, 1_440.0, "node", "n009 lost: the lease ran out", of_node, level="warn"),
        change(
            8_345, 1_440.0, "incident", "inc-41: n009: the lease ran out", of_incident, of_node, level="warn"
        ),
        change(
            8_352, 1_437.6, "plan", f"{JOB}: borrow: {SPARE} takes the place of n009; can lose 2", of_incident
        ),
        change(8_361, 1_436.8, "incident", "inc-41: recovered in 3.214 s", of_incident, of_node),
        change(8_402, 1_201.0, "node", "n009 joined", of_node),
        change(8_977, 130.0, "checkpoint", f"{JOB}: step 12,400 is in ckpt/gpt2-xl/step-12400", of_job),
    )


def loss_of(name: str, seq: int, ago_s: float, why: str) -> Change:
    """A node died."""
    return change(seq, ago_s, "node", f"{name} lost: {why}", f"node:{name}", level="warn", node=name)


def phases(*pairs: tuple[Phase, float]) -> tuple[PhaseView, ...]:
    """One after the other, each so many seconds long."""
    found, at = [], 0.0
    for phase, took_s in pairs:
        found.append(PhaseView(phase, at, took_s))
        at += took_s
    return tuple(found)


def incident(**changes: Any) -> IncidentView:
    """The one of the day: ``DEAD`` was killed, and a standby node has its place."""
    usual: dict[str, Any] = {
        "id": "inc-42", "job": JOB, "cause": f"{DEAD}: signal 9", "nodes": (DEAD,), "at": NOW - 24.0,
        "epoch": 4,
        "step": STEP - 50, "open": False, "total_s": 1.224, "copied_bytes": COPIED,
        "phases": phases(("detect", 0.006), ("plan", 0.038), ("reconfigure", 0.26), ("copy", 0.74),
        ("resume", 0.18)),
        "reason": f"borrow: {SPARE}, a standby node, takes stage 2 of pipeline 1; can lose 2",
        "layer_gradients": 67, "step_layer_gradients": 950, "committed_s": 0.412, "cost_s": 41.0,
        "sources": (SourceView("n002/0", COPIED * 5 // 8), SourceView("n010/0", COPIED * 3 // 8)),
        "rejected": (
            RejectedView("stay re-routed", 262.0,
            "peers of stage 2 would be 19 % slower until the next loss"),
            RejectedView("re-instantiate: pipelines of 4+3+3 nodes", 118.0, f"{SPARE} would stand idle"),
            RejectedView("rollback", 391.0, "60 steps would be computed again"),
        ),
    }  # fmt: skip
    return IncidentView(**(usual | changes))


def earlier() -> IncidentView:
    """One that is over for long."""
    return incident(
        id="inc-41", cause="n009: the lease ran out", nodes=("n009",), at=NOW - 1_440.0, epoch=2, step=9_870,
        total_s=3.214,
        phases=phases(("detect", 1.9), ("plan", 0.041), ("reconfigure", 0.31), ("copy", 0.79),
        ("resume", 0.173)),
        reason=f"borrow: {SPARE} takes the place of n009; can lose 2", rejected=(), cost_s=0.0,
    )  # fmt: skip


def impact(*nodes: str, **changes: Any) -> ImpactView:
    """What would follow without ``nodes``."""
    usual: dict[str, Any] = {
        "job": JOB, "nodes": nodes, "lost_layers": (), "steps_back": 0, "stops": False, "stall_s": 1.21,
        "throughput": 0.909,
        "copied_bytes": COPIED, "copy_s": 0.74, "can_lose": 1,
        "plan": moved(FLEET.pipelines, {nodes[0]: SPARE}),
        "reason": f"borrow: {SPARE}, a standby node, takes the place of {nodes[0]}; can lose 1",
        "rejected": (RejectedView("stay re-routed", 262.0, "19 % slower until the next loss"),),
    }  # fmt: skip
    return ImpactView(**(usual | changes))


def of_marked() -> ImpactView:
    """What would follow without ``MARKED``."""
    left = [name for name in FLEET.names if name not in {DEAD, *MARKED}]
    smaller = Fleet((3, 3, 3))
    return impact(
        *MARKED, throughput=0.818, stall_s=1.43, copied_bytes=2 * COPIED, copy_s=1.1, can_lose=1,
        plan=moved(smaller.pipelines, dict(zip(smaller.names, left, strict=True))),
        reason="pipelines of 3, 3 and 3 nodes: pipelines 0 and 1 shrink; can lose 1",
        rejected=(
            RejectedView("stay re-routed", 307.0,
            "peers of stages 1 and 2 would be 31 % slower until the next loss"),
            RejectedView("rollback", 391.0, "80 steps would be computed again"),
        ),
    )  # fmt: skip


# --------------------------------------------------------------------------- other plans


def moved(pipelines: Iterable[PipelineView], to: Mapping[str, str]) -> tuple[PipelineView, ...]:
    """The same pipelines on other nodes."""
    return tuple(
        msgspec.structs.replace(
            line,
            nodes=tuple(to.get(name, name) for name in line.nodes),
            stages=tuple(LayerRange(_device(each.device, to), each.start, each.stop) for each in line.stages),
        )
        for line in pipelines
    )


def lanes_moved(schedule: ScheduleView, to: Mapping[str, str]) -> ScheduleView:
    """The same step on other nodes."""
    lanes = tuple(msgspec.structs.replace(lane, device=_device(lane.device, to)) for lane in schedule.lanes)
    return msgspec.structs.replace(schedule, lanes=lanes)


def _device(device: str, to: Mapping[str, str]) -> str:
    node, _, index = device.partition("/")
    return f"{to.get(node, node)}/{index}"


def node_of(device: str) -> str:
    """``"n003"`` of ``"n003/0"``."""
    return device.partition("/")[0]


def lost(names: Iterable[str], why: str) -> dict[str, tuple[NodeState, str]]:
    """States of nodes that died."""
    return dict.fromkeys(names, ("lost", why))


def _placed(nodes: tuple[NodeView, ...], pipelines: tuple[PipelineView, ...]) -> tuple[NodeView, ...]:
    """``nodes`` with the layers that ``pipelines`` give to those that are well."""
    held = {node_of(each.device): (each,) for line in pipelines for each in line.stages}
    return tuple(
        msgspec.structs.replace(
            node, state="active" if node.name in held else "standby", layers=held.get(node.name, ())
        )
        if node.state in {"active", "standby"}
        else node
        for node in nodes
    )


def _holders(pipelines: tuple[PipelineView, ...], gone: Collection[str]) -> tuple[LayerView, ...]:
    last = max((line.stages[-1].stop for line in pipelines), default=0)
    held: list[list[str]] = [[] for _ in range(last)]
    for line in pipelines:
        for each in line.stages:
            if node_of(each.device) not in gone:
                for layer in range(each.start, each.stop):
                    held[layer].append(each.device)
    return tuple(LayerView(layer, len(devices), tuple(devices)) for layer, devices in enumerate(held))


def _used(fleet: Fleet, pipelines: tuple[PipelineView, ...]) -> tuple[TemplateView, ...]:
    """The templates, with those counted that ``pipelines`` are of."""
    sizes = [len(line.stages) for line in pipelines]
    return tuple(
        msgspec.structs.replace(each, instances=sizes.count(each.num_nodes)) for each in fleet.templates()
    )


# --------------------------------------------------------------------------- other jobs


def other_jobs(count: int) -> tuple[JobView, ...]:
    """So many beside the one at work: those that have ended, and a queue."""
    names = (
        "llama-160m",
        "gpt2-small",
        "moe-8x1b",
        "ablate-lr-3e-4",
        "ablate-lr-6e-4",
        "a-job-with-a-long-name-2026",
    )
    states: tuple[JobState, ...] = ("done", "queued", "failed", "queued", "cancelled", "queued")
    found = []
    for number in range(count):
        state = states[number % len(states)]
        step = {"done": 20_000, "failed": 7_310, "cancelled": 400}.get(state, 0)
        found.append(
            FLEET.job(
                id=f"{names[number % len(names)]}-{number + 2}", name=names[number % len(names)], state=state,
                step=step, loss=FLEET.loss(step) if step else None, tolerance=-1, samples_per_s=0.0,
                step_s=0.0,
                nodes=(), incidents=0, submitted_at=NOW - 90_000.0 + 3_000.0 * number, checkpoint_step=step,
                finished_at=NOW - 400.0 * number if state != "queued" else None, progress=None,
                reason="3 steps in a row had a loss that is not finite" if state == "failed" else "",
            )
        )  # fmt: skip
    return tuple(found)


# --------------------------------------------------------------------------- all of it


def status(fleet: Fleet) -> Status:
    """Of its daemon."""
    return msgspec.structs.replace(
        status_view(Path("/var/lib/oobleck")),
        version=__version__,
        endpoint="tcp://10.0.0.1:7700",
        nodes=fleet.num_nodes,
    )


def told(
    events: Iterable[Change],
    incidents: tuple[IncidentView, ...],
    *,
    fleet: Fleet = FLEET,
    job: Mapping[str, Any] | None = None,
    pipelines: tuple[PipelineView, ...] | None = None,
    states: Mapping[str, tuple[NodeState, str]] | None = None,
    watched: Mapping[str, Any] | None = None,
    gap: tuple[float, float] = (0.0, 0.0),
    stands_s: float = 0.2,
    others: tuple[JobView, ...] = (),
) -> tuple[AnyFact, ...]:
    """All that a console knows of ``fleet`` at ``NOW``, with the changes that make a scene of it.
    ``stands_s``: since its newest step.
    """
    view = fleet.job(
        **(
            {
                "step": STEP,
                "loss": fleet.loss(STEP),
                "incidents": len(incidents),
                "submitted_at": NOW - 7_800.0,
            }
            | dict(job or {})
        )
    )
    plan = fleet.pipelines if pipelines is None else pipelines
    nodes = _placed(fleet.nodes(states), plan)
    gone = frozenset(node.name for node in nodes if node.state in {"lost", "left"})
    usual: dict[str, Any] = {
        "schedules": SampledSteps(JOB, tuple(range(STEP - 300, STEP + 1, 10))),
        "schedule": fleet.schedule(STEP, NOW - 0.4),
        "modelled": fleet.schedule(0, 0.0, measured=False), "layers": _holders(plan, gone),
        "goodput": fleet.goodput(0.992, BEST_AT), "curve": fleet.curve(view.step, evaluated=True),
    }  # fmt: skip
    facts = (
        Fetched(NOW, status(fleet), (view, *others), nodes, plan, _used(fleet, plan), incidents),
        PastHistory(NOW, JOB, fleet.steps(view.step, NOW - stands_s, step_s=view.step_s, gap=gap)),
        *(ChangesHeard(NOW, each) for each in events),
        Watched(NOW, **(usual | dict(watched or {}))),
    )
    asked = candidates(fold(View(), facts), many=True) if plan else ()
    answered = [
        impact(*nodes, throughput=0.924 - number / 100, stall_s=1.09 + number / 10)
        for number, nodes in enumerate(asked)
    ]
    return (*facts, *(Watched(NOW, impact=each) for each in answered), Watched(NOW, impact=of_marked()))
