"""The kill matrix of stages of several devices: a death in every phase of a step, of one device, of two, of a
node and of two nodes, by policy.

Owns its cells, the clusters that they need, and how one is carried out there. Cells of stages of one device
are ``matrix``'.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from oobleckd.planner.plan import device_name, node_of
from oobleckd.planner.policy import REROUTING, ROLLING_BACK
from oobleckd.protocol.job import Job, PolicyName
from oobleckd.protocol.jobviews import JobView, ShownStage
from tests.helpers.cluster import TINY, Cluster, tiny_job
from tests.helpers.manners import MANNERS, Manner
from tests.helpers.matrix import AHEAD, STEPS, drain, survivable, undrain

Victim = Literal["device", "devices", "copies", "node", "nodes"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)
"""Devices: two of unequal rank, in two pipelines. Copies: in two copies of the same layers, which are more
losses than copies are kept for, though every shard is left; the job may go back to a checkpoint.
"""
PHASES = (
    "gather", "gather-backward", "forward", "backward", "weights", "reduce", "means", "reduced", "commit",
    "update", "updated", "checkpoint", "deploy", "copy",
)  # fmt: skip
"""Nobody makes an early update where a stage has several devices."""
MOVE_PHASES = ("deploy", "copy")
EACH = (2, 4)
"""Devices of a stage, and of a node."""
NUM_NODES = 5
"""Two pipelines of two, and the guest."""
_SAVES_EVERY = 3
_NUM_TURNS = 3
"""Of a step: two for one of the pipelines, one for the other."""
_MOVING_STEPS = 40
_MEMORY = "64MiB"  # of a device, which is room for everything: how deep pipelines are is asked for
_MAX_NAME = 63  # characters of a job's name

Place = tuple[str, int]
"""A node, and the number of one of its devices."""


@dataclass(frozen=True)
class SharedCell:
    """``victim`` dies in ``phase`` of a job that trains in ``manner`` with stages of ``each`` devices;
    ``turn`` says which, of those that it may be.
    """

    each: int
    phase: str
    victim: Victim
    manner: Manner
    turn: int

    @property
    def name(self) -> str:
        return f"{self.each}-{self.phase}-{self.victim}-{self.manner.name}"

    @property
    def moving(self) -> bool:
        """Whether it happens when the plan changes."""
        return self.phase in MOVE_PHASES

    def job(self) -> Job:
        """The job that it happens to."""
        saving = self.phase == "checkpoint" or self.manner.policy in ROLLING_BACK
        tables = self.manner.tables(self.each, saving=saving)
        tables["resources"] = shared_resources(self.each, 2)
        tables["checkpoint"] = {"every": _SAVES_EVERY if saving else 0}
        if self.phase == "checkpoint":
            # Holders of layers write them in turns: with fewer layers than holders some write nothing.
            tables["model"] = {"config": TINY | {"n_layer": 4 * self.each + 2}}
        train = {"steps": _MOVING_STEPS if self.moving else STEPS, "micro_batch": 1}
        train["global_batch"] = _NUM_TURNS * self.each
        return tiny_job(self.name[:_MAX_NAME], train=train, **tables)


def shared_resources(each: int, nodes: int) -> dict[str, Any]:
    """`[resources]` of a job with stages of ``each`` devices, in pipelines of ``nodes`` nodes or more."""
    return {"device_memory": _MEMORY, "min_pipeline_nodes": nodes, "devices_per_stage": each}


def shared_cells(each: int) -> list[SharedCell]:
    """Every phase, victim and policy there is with stages of ``each`` devices; schedules take turns."""
    found = []
    for turn, values in enumerate(itertools.product(PHASES, VICTIMS, get_args(PolicyName))):
        phase, victim, policy = values
        manners = [manner for manner in MANNERS if manner.policy == policy and _occurs(phase, manner)]
        if manners and not (victim == "copies" and phase in MOVE_PHASES):
            found.append(SharedCell(each, phase, victim, manners[turn % len(manners)], turn))
    return found


def some_shared_cells() -> list[SharedCell]:
    """A few for the tests, of stages of two devices; ``make test`` runs the first."""
    # Under one clipping, so that one run without failures serves all of them.
    wanted = (
        ("gather", "device", "adaptive"),
        ("reduced", "copies", "slipstream"),
        ("update", "node", "oobleck"),
    )
    cells = shared_cells(2)
    return [cell for cell in cells if (cell.phase, cell.victim, cell.manner.policy) in wanted]


def _occurs(phase: str, manner: Manner) -> bool:
    return not (
        (phase == "weights" and manner.backward == "fused")
        or (phase == "means" and manner.check_every)
        or (phase == "copy" and manner.policy in ROLLING_BACK)
    )


def run_shared_cell(cluster: Cluster, cell: SharedCell) -> JobView:
    """Carry out ``cell`` on a cluster of ``NUM_NODES`` nodes with a spare each; returns the finished job.
    AssertionError says what broke.
    """
    cluster.heal()
    cluster.until(lambda: _spares(cluster) or None, "a spare in every node")
    guest = max(node.name for node in cluster.client.nodes())
    drain(cluster, guest)
    try:
        return _run(cluster, cell, guest)
    finally:
        if any(n.name == guest and n.state in {"draining", "drained"} for n in cluster.client.nodes()):
            cluster.client.undrain(guest, "matrix")


def _run(cluster: Cluster, cell: SharedCell, guest: str) -> JobView:
    before = len(cluster.fired())
    job = cluster.client.submit(cell.job()).id
    view = cluster.at_step(job, 1)
    for pipeline in view.pipelines:
        devices = {len(stage.devices) for stage in pipeline.shown}
        assert devices == {cell.each}, f"stages of {devices} devices"
        assert len(pipeline.nodes) > 1, pipeline
    doomed = victims(view, cell)
    nodes = sorted({node for node, _ in doomed})
    if cell.moving and cell.phase == "copy" and cell.manner.policy in REROUTING:
        for node in nodes:
            drain(cluster, node)
    for node, number in doomed:
        round_ = 0 if cell.moving else view.step + AHEAD
        cluster.client.kill(node, "device", at=cell.phase, round=round_, device=number)
    if cell.moving:
        _move_until(_Hits(cluster, cell, doomed, before), view, nodes, guest)
    hits = _Hits(cluster, cell, doomed, before)
    hits.take_nodes()
    if cell.moving and cell.manner.policy in ROLLING_BACK:
        for node in cluster.client.nodes():  # too few may be left without those who were drained
            if node.state in {"draining", "drained"}:
                cluster.client.undrain(node.name, "matrix")
    done = cluster.job_in(job, "done")
    assert hits.all_fired(), f"{cell.name}: {doomed} were to die, but only {hits.fired()} did"
    if not cell.moving:  # who dies while a plan is deployed is lost in it, before training goes on
        assert any(incident.job == job for incident in cluster.client.incidents()), "no incident was opened"
    if cell.manner.policy not in ROLLING_BACK and cell.victim != "copies":
        assert done.steps_lost == 0, done
    assert done.step == done.steps
    cluster.verify(job)
    return done


@dataclass
class _Hits:
    """Which of ``doomed`` have died in the phase of ``cell``; the first ``before`` faults were others'."""

    cluster: Cluster
    cell: SharedCell
    doomed: Sequence[Place]
    before: int

    def fired(self) -> set[str]:
        """Devices."""
        hits = self.cluster.fired()[self.before :]
        return {str(hit["device"]) for hit in hits if hit["point"] == self.cell.phase}

    def all_fired(self) -> bool:
        """Each device; of a node the first one, for the others die with it."""
        fired = self.fired()
        if self.cell.victim in {"node", "nodes"}:
            return {node for node, _ in self.doomed} <= {node_of(device) for device in fired}
        return {device_name(*place) for place in self.doomed} <= fired

    def take_nodes(self) -> None:
        """Where nodes are to die: all that is left of one, as soon as one of its devices has."""
        if self.cell.victim not in {"node", "nodes"}:
            return
        left = {node for node, _ in self.doomed}

        def taken() -> bool | None:
            for node in sorted(left & {node_of(device) for device in self.fired()}):
                self.cluster.kill(node, "sigkill")
                left.discard(node)
            return not left or None

        self.cluster.until(taken, f"{sorted(left)} to die at {self.cell.phase}")


def _goes_on(hits: _Hits, job: str) -> None:
    """Wait until ``job`` has made two more steps, or all have died who are to."""
    step = hits.cluster.client.job(job).step

    def done() -> bool | None:
        view = hits.cluster.client.job(job)
        return (view.state == "running" and view.step >= step + 2) or hits.all_fired() or None

    hits.cluster.until(done, f"{job} to go on from step {step}")


def victims(job: JobView, cell: SharedCell) -> list[Place]:
    """Who dies in ``cell``. Every shard keeps a live holder; every layer a whole copy, but where two
    copies are hit.
    """
    first = _stage(job, cell.turn % 2, last=cell.turn // 2 % 2 == 1)
    node, number = node_of(first.devices[0]), cell.turn % cell.each
    if cell.victim == "device":
        return [(node, number)]
    if cell.victim == "node":
        return [(node, index) for index in range(cell.each)]
    if cell.victim == "copies" and len(job.pipelines) > 1:
        others = [stage for p in job.pipelines if node not in p.nodes for stage in p.shown]
        twin = next((stage for stage in others if stage.start <= first.start < stage.stop), None)
        assert twin is not None, f"one copy alone of layer {first.start}: {job.pipelines}"
        return [(node, number), (node_of(twin.devices[0]), (number + 1) % cell.each)]
    home = next(p for p in job.pipelines if node in p.nodes)
    rest = sorted(
        (n for p in job.pipelines for n in p.nodes if n != node), key=lambda n: (n in home.nodes, n)
    )
    bearable = cell.manner.policy in ROLLING_BACK  # maybe of one pipeline: all go back to a checkpoint
    second = next((n for n in rest if bearable or survivable(job, {node, n})), "")
    assert second, f"no two nodes of {job.id} can die together: {job.pipelines}"
    if cell.victim in {"devices", "copies"}:
        return [(node, number), (second, (number + 1) % cell.each)]
    return [(each, index) for each in (node, second) for index in range(cell.each)]


def _stage(job: JobView, number: int, *, last: bool) -> ShownStage:
    return job.pipelines[number % len(job.pipelines)].shown[-1 if last else 0]


def _spares(cluster: Cluster) -> bool:
    return all(node.spare == "ready" for node in cluster.client.nodes())


def _move_until(hits: _Hits, view: JobView, nodes: Sequence[str], guest: str) -> None:
    """Have nodes come and go until the doomed have died; first those that were drained for it come back."""
    cluster = hits.cluster
    rolls_back = hits.cell.manner.policy in ROLLING_BACK
    states = ("active", "standby") if rolls_back else ("active",)
    for node in nodes:
        if any(n.name == node and n.state == "drained" for n in cluster.client.nodes()):
            undrain(cluster, node, hits.all_fired, ("active", "standby"))
    members = [n for p in view.pipelines for n in p.nodes if n not in nodes]
    leaving = [n for n in members if rolls_back or survivable(view, {*nodes, n})]
    moves = [(guest, True), (guest, False), *((n, back) for n in leaving for back in (False, True))]
    for node, back in moves * 3:
        if rolls_back:
            # Nobody is in use while such a job stops and starts anew, so nodes would come and go in vain.
            _goes_on(hits, view.id)
        if hits.all_fired():
            return
        if back:
            undrain(cluster, node, hits.all_fired, states)
        else:
            drain(cluster, node, hits.all_fired)
