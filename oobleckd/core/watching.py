"""What somebody who watches asks of the machine's state: layers at risk, where time went, and the questions
for the planner's pool.

Owns pure functions over ``Core``, in the structs of ``protocol.watch``. What takes long is answered elsewhere
(``impact``, ``modelled``): here is what the answer is made from.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Collection

import msgspec

from oobleckd.core import jobs, steer
from oobleckd.core.context import Core
from oobleckd.core.goodput import phases_of
from oobleckd.core.questions import LossQuestion, StepQuestion
from oobleckd.core.run import Run
from oobleckd.core.samples import Sample
from oobleckd.core.schedules import share_waited
from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import node_of
from oobleckd.planner.policy import Situation
from oobleckd.protocol.watch import GoodputView, LayerView, Lost

NOTICE_S = 0.006
"""From a loss to the decision, before this job has had one: what it takes on one machine
(benchmarks/recovery.py).
"""


def layer_views(job: JobRecord) -> list[LayerView]:
    """Who holds each layer of ``job`` now; nothing while it is not deployed."""
    if job.layout is None or job.final:
        return []
    holders: list[list[str]] = [[] for _ in range(job.layout.num_layers)]
    for device in job.survivors():
        for layer in job.layout.holdings[device].layers():
            holders[layer].append(device)
    copies = job.layout.copies(job.layout.unable(job.dead))
    return [
        LayerView(layer, whole, tuple(devices))
        for layer, (whole, devices) in enumerate(zip(copies, holders, strict=True))
    ]


def goodput_view(core: Core, job: JobRecord) -> GoodputView:
    """Where the time of its devices went, up to now; what is not booked yet as it would be."""
    book = copy.copy(job.book)  # its times alone change below
    book.until(core.now)
    run = core.run if core.run is not None and core.run.job is job else None
    incident = run.incident if run is not None else None
    pending, evaluated_s = book.split(phases_of(incident.view(core.now)) if incident is not None else {})
    evaluated_s += book.evaluated_s
    lost: dict[Lost, float] = {cause: booked_s + pending[cause] for cause, booked_s in book.lost_s.items()}
    useful_s = max(0.0, book.total_s - sum(lost.values()) - evaluated_s)
    lost["bubble"] = useful_s * bubble(core, job)
    return GoodputView(
        job=job.id,
        total_s=book.total_s,
        useful_s=useful_s - lost["bubble"],
        lost_s=lost,
        evaluated_s=evaluated_s,
        of_fault_free=book.of_fault_free,
        step_s=book.pace_s,
        best_step_s=book.best_s,
        best_at=book.best_at,
        plan_step_s=job.plan.step_s if job.plan is not None and not job.final else 0.0,
    )


def all_joined(core: Core, job: JobRecord) -> Situation | None:
    """All nodes that joined, those that are gone among them, as many as ``job`` may use: its best plan is
    made for them. None while the job is not planned.
    """
    if job.setup is None or not job.templates or job.final:
        return None
    here = {name for name, node in core.members.nodes.items() if node.alive and not node.left}
    nodes = sorted(here | core.state.nodes.keys())[: job.spec.resources.max_nodes or None]
    zones = {name: expected.zone for name, expected in core.state.nodes.items() if expected.zone}
    return Situation(tuple(nodes), {}, zones={name: zones[name] for name in nodes if name in zones})


def bubble(core: Core, job: JobRecord) -> float:
    """The share of a step in which devices wait, over all of them: of the newest that they told of (0 where
    none is known).
    """
    sample = core.samples.step(job.id, 0)
    return share_waited(sample) if sample is not None else 0.0


def unknown_nodes(core: Core, job: JobRecord, nodes: Collection[str]) -> list[str]:
    """Those of ``nodes`` that nobody has ever heard of."""
    inside = {node_of(device) for device in job.layout.holdings} if job.layout is not None else set()
    return sorted(set(nodes) - core.members.nodes.keys() - core.state.nodes.keys() - inside)


def loss_of(core: Core, run: Run, nodes: Collection[str]) -> LossQuestion | None:
    """What there is when ``nodes`` have died; None while no layout is in force."""
    job, named = run.job, frozenset(nodes)
    if job.layout is None or job.plan is None or job.setup is None:
        return None
    now = steer.situation(core, run)
    after = msgspec.structs.replace(
        now,
        nodes=core.candidates(job, named),
        holdings={d: layers for d, layers in now.holdings.items() if node_of(d) not in named},
        held_per_stage=0,
        zones={name: zone for name, zone in now.zones.items() if name not in named},
    )
    gone = {device for device in job.layout.holdings if node_of(device) in named}
    kept = job.checkpoint_counters.step if job.checkpoint else job.start.step
    return LossQuestion(
        job.id,
        job.spec.fault_tolerance.policy,
        tuple(sorted(named)),
        job.plan,
        job.layout,
        tuple(sorted({*job.dead, *gone})),
        job.dead,
        after,
        _notice_s(core, job),
        max(0, job.counters.step - kept),
        jobs.other_setups(core, run) if job.spec.resources.devices_per_stage == "auto" else (),
    )


def _notice_s(core: Core, job: JobRecord) -> float:
    """From a loss to the decision: as it took with most of this job's; but not what took longer than the
    longest lease, as that was waiting for nodes.
    """
    took = [
        sum(phase.duration_s for phase in view.phases if phase.phase in {"detect", "plan"})
        for view in core.state.incidents.values()
        if view.job == job.id and not view.open
    ]
    noticed = [each_s for each_s in took if each_s <= core.config.lease_s]
    return statistics.median(noticed) if noticed else NOTICE_S


def step_question(core: Core, job: JobRecord, sample: Sample | None) -> StepQuestion | None:
    """How the step of ``sample`` was to run, or without one the next step; None while no layout
    is in force.
    """
    if job.layout is None or job.plan is None or job.setup is None:
        return None
    of = sample or Sample(
        job.id, job.counters, job.epoch, job.layout, job.plan, job.detours, job.dead, core.now
    )
    return StepQuestion(
        job.id,
        of.counters.step + 1,
        of.epoch,
        of.at,
        job.setup,
        of.plan,
        of.layout,
        of.detours,
        of.gone,
        of.counters.round,
    )
