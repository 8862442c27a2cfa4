"""The kill matrix: a death in every phase of a step, of every kind of victim, alone or with another.

Owns the cells and how one is carried out on a long-lived cluster: submit, arm, wait for the end, compare,
wait until the dead are back. A cell fails unless its kill fired in the phase that names it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oobleckd.protocol.api import JobView
from planner.plan import node_of
from tests.helpers.cluster import Cluster, tiny_job

STEP_PHASES = ("forward", "backward", "reduce", "reduced", "commit", "update")
MOVE_PHASES = ("deploy", "copy")
VICTIMS = ("first", "middle", "last", "deepest")
AHEAD = 4


@dataclass(frozen=True)
class Cell:
    """``count`` devices die in ``phase``; the first of them is ``victim``."""

    phase: str
    victim: str
    count: int

    @property
    def name(self) -> str:
        return f"{self.phase}-{self.victim}-{self.count}"


def all_cells() -> list[Cell]:
    """Every combination."""
    product = itertools.product(STEP_PHASES + MOVE_PHASES, VICTIMS, (1, 2))
    return [Cell(*values) for values in product]


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Few cells in which every pair of values of two different axes still occurs."""
    left = {pair for cell in cells for pair in _pairs(cell)}
    chosen = []
    while left:
        best = max(cells, key=lambda cell: len(left & set(_pairs(cell))))
        chosen.append(best)
        left -= set(_pairs(best))
    return chosen


def _pairs(cell: Cell) -> Iterator[tuple[tuple[int, object], tuple[int, object]]]:
    values = list(enumerate((cell.phase, cell.victim, cell.count)))
    return itertools.combinations(values, 2)


def victims(job: JobView, cell: Cell) -> list[str]:
    """Nodes that die in this cell; every layer keeps a live holder."""
    pipelines = sorted(job.pipelines, key=lambda p: len(p.stages))
    deepest, shallowest = pipelines[-1], pipelines[0]
    stages = {
        "first": shallowest.stages[0],
        "last": shallowest.stages[-1],
        "middle": deepest.stages[len(deepest.stages) // 2],
        "deepest": deepest.stages[-1],
    }
    first = node_of(stages[cell.victim].device)
    chosen = [first]
    others = [n for p in job.pipelines for n in p.nodes if n != first]
    home = next(p for p in job.pipelines if first in p.nodes)
    others.sort(key=lambda n: (n in home.nodes, n))  # from another pipeline where that can be survived
    for node in others:
        if len(chosen) < cell.count and survivable(job, {*chosen, node}):
            chosen.append(node)
    assert len(chosen) == cell.count, f"no {cell.count} nodes of {job.id} can die together"
    return chosen


def survivable(job: JobView, dead: set[str]) -> bool:
    """Whether every layer keeps a holder when the nodes ``dead`` are gone."""
    held = [s for p in job.pipelines for s in p.stages if node_of(s.device) not in dead]
    top = max(s.stop for p in job.pipelines for s in p.stages)
    return all(any(s.start <= layer < s.stop for s in held) for layer in range(top))


def run_cell(cluster: Cluster, cell: Cell) -> JobView:
    """Carry out ``cell``; returns the finished job. AssertionError says what broke."""
    nodes = cluster.usable(cluster.num_nodes)
    before = len(cluster.fired())
    job = cluster.client.submit(tiny_job(f"cell-{cell.name}")).id
    view = cluster.at_step(job, 2)
    doomed = victims(view, cell)
    if cell.phase in MOVE_PHASES:
        _kill_in_move(cluster, view, cell, doomed)
    else:
        for node in doomed:
            cluster.client.kill(node, "device", at=cell.phase, round=view.step + AHEAD)
    done = cluster.job_in(job, "done")
    hits = cluster.fired()[before:]
    dead = {node_of(str(hit["device"])) for hit in hits if hit["point"] == cell.phase}
    assert set(doomed) <= dead, f"{cell.name}: {doomed} were to die in {cell.phase}, but {hits}"
    assert done.steps_lost == 0, done
    assert done.step == done.steps
    cluster.verify(job)
    _check_redone(cluster, done, len(nodes))
    return done


def _kill_in_move(cluster: Cluster, view: JobView, cell: Cell, doomed: list[str]) -> None:
    """Deploy and copy happen when the plan changes: a drained node makes it change."""
    for node in doomed:
        cluster.client.kill(node, "device", at=cell.phase, round=0)
    spare = next(
        n for p in view.pipelines for n in p.nodes if n not in doomed and survivable(view, {*doomed, n})
    )
    cluster.client.drain(spare, "matrix")
    cluster.until(lambda: True if len(cluster.fired()) else None, "the fault points")
    cluster.client.undrain(spare, "matrix")


def _check_redone(cluster: Cluster, job: JobView, _nodes: int) -> None:
    """Only what died with the victims, or was routed over them, was computed again."""
    for incident in cluster.client.incidents():
        if incident.job == job.id and incident.step_layer_gradients:
            assert incident.layer_gradients <= incident.step_layer_gradients, incident


__all__ = ["Cell", "all_cells", "pairwise", "run_cell", "survivable"]
