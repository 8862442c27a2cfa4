"""The kill matrix: a death in every phase of a step, of every kind of victim, alone or with another, by
policy.

Owns the cells and how one is carried out on a long-lived cluster: submit, arm, wait for the end, compare,
wait until the dead are back. A cell fails unless its kill fired in the phase that names it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

from oobleckd.planner.plan import node_of
from oobleckd.planner.policy import REROUTING, ROLLING_BACK
from oobleckd.protocol.job import Job, PolicyName
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.parts import Counters
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.datakinds import EVALUATES_EVERY, KINDS, data_of, eval_of
from tests.helpers.manners import KEEPING, KEEPING_MANNERS, MANNERS, Manner
from tests.helpers.precopying import PRECOPYING, die_in_precopy

STEP_PHASES = (
    "forward", "backward", "weights", "reduce", "means", "reduced", "backup", "validate", "commit", "update",
)  # fmt: skip
MOVE_PHASES = ("deploy", "copy")
EVAL_PHASES = ("forward", "reduce", "reduced", "commit", "updated", "frozen", "checkpoint")
"""Of a round that evaluates. Frozen: of whoever answers a report of another's death in it."""
VICTIMS = ("first", "middle", "last", "deepest")
AHEAD = 4
STEPS = 10
"""Of a job in whose step somebody dies: the step of the kill, and a few after it."""
_OF_EARLY = ("backup", "validate")
"""Phases of an update before all votes are in, which a device makes that does not vote last: there have to be
rounds enough for that.
"""
MOVING_TRAIN = {"steps": 24, "global_batch": 6}
"""Of a job that is to last while nodes come and go: whoever is to die does by step 8. One run without
failures serves all of them.
"""
_MAX_NAME = 63  # characters of a job's name
NODES = 6
"""Of the cluster: pipelines of two and three, and the guest."""


@dataclass(frozen=True)
class Cell:
    """``count`` devices die in ``phase`` of a job that trains in ``manner``; the first of them is
    ``victim``. ``data``: the kind of data that it trains on. ``evaluates``: they die in a round of an
    evaluation.
    """

    phase: str
    victim: str
    count: int
    manner: Manner = MANNERS[0]
    data: str = KINDS[0]
    evaluates: bool = False

    @property
    def name(self) -> str:
        what = "eval-" if self.evaluates else ""
        return f"{what}{self.phase}-{self.victim}-{self.count}-{self.manner.name}-{self.data}"


def every_cell() -> list[Cell]:
    """Every combination that there is, but for those of ``precopy_cells``; without copies under varuna, which
    makes none. Kinds of data take turns.
    """
    product = itertools.product(STEP_PHASES + MOVE_PHASES, VICTIMS, (1, 2), MANNERS)
    cells = (cell for values in product if _is_one(cell := Cell(*values)))
    return [replace(cell, data=KINDS[turn % len(KINDS)]) for turn, cell in enumerate(cells)]


def on_all_data(cell: Cell) -> list[Cell]:
    """The same cell on every kind of data."""
    return [replace(cell, data=kind) for kind in KINDS]


def _is_one(cell: Cell) -> bool:
    manner = cell.manner
    return not (
        (cell.phase == "weights" and manner.backward == "fused")
        or (cell.phase == "means" and manner.check_every)
        or (cell.phase in {"backup", "validate"} and manner.update == "flushed")
        or (cell.phase == "copy" and manner.policy in ROLLING_BACK)
    )


def eval_cells() -> list[Cell]:
    """Every death in a round that evaluates, under each policy; schedules and kinds of data take turns."""
    by_policy = [[m for m in MANNERS if m.policy == policy] for policy in get_args(PolicyName)]
    product = itertools.product(EVAL_PHASES, VICTIMS, by_policy)
    return [
        Cell(
            phase,
            victim,
            2 if phase == "frozen" else 1,
            manners[turn % len(manners)],
            KINDS[turn % len(KINDS)],
            evaluates=True,
        )
        for turn, (phase, victim, manners) in enumerate(product)
        if phase != "frozen" or manners[0].policy not in ROLLING_BACK  # which asks nobody how far he is
    ]


def precopy_cells() -> list[Cell]:
    """Every death while pre-copies are made, by policy that makes any; the schedules take turns."""
    manners = [[m for m in KEEPING_MANNERS if m.policy == policy and m.chunks == 1] for policy in KEEPING]
    return [
        Cell(phase, victim, 1, options[(turn + number) % len(options)])
        for turn, (phase, victim) in enumerate(PRECOPYING)
        for number, options in enumerate(manners)
    ]


def some_precopy_cells() -> list[Cell]:
    """One for each of those deaths, under policies in turn."""
    cells = precopy_cells()
    return [cells[turn * len(KEEPING) + turn % len(KEEPING)] for turn in range(len(PRECOPYING))]


def all_cells() -> list[Cell]:
    """Every phase, victim, number of deaths and policy; the schedules take turns."""
    chosen = []
    alike = itertools.groupby(every_cell(), lambda cell: (cell.phase, cell.victim, cell.count))
    for turn, (_, group) in enumerate(alike):
        cells = list(group)
        by_policy = [[c for c in cells if c.manner.policy == policy] for policy in get_args(PolicyName)]
        chosen += [options[turn % len(options)] for options in by_policy if options]
    return chosen + precopy_cells() + eval_cells()


def pairwise(cells: Sequence[Cell]) -> list[Cell]:
    """Few cells in which every pair of values of two different axes still occurs; among equals, the manner
    seen least.
    """
    # A set of pairs is a number, with a bit for each: they are compared half a million times.
    bits: dict[object, int] = {}
    pairs = [
        (each, sum(bits.setdefault(pair, 1 << len(bits)) for pair in _pairs(each)))
        for cell in cells
        for each in on_all_data(cell)
    ]
    left = (1 << len(bits)) - 1
    chosen: list[Cell] = []
    seen: Counter[Manner] = Counter()
    while left:
        best, found = max(pairs, key=lambda pair: ((left & pair[1]).bit_count(), -seen[pair[0].manner]))
        chosen.append(best)
        seen[best.manner] += 1
        left &= ~found
    return chosen


def _pairs(cell: Cell) -> Iterator[tuple[tuple[int, object], tuple[int, object]]]:
    manner = cell.manner
    values = (cell.phase, cell.victim, cell.count, manner.policy, manner.form, manner.update, cell.data)
    return itertools.combinations(enumerate(values), 2)


def victims(job: JobView, cell: Cell) -> list[str]:
    """Nodes that die in this cell; every layer keeps a live holder, but where all roll back to a checkpoint
    anyway.
    """
    pipelines = sorted((list(dict.fromkeys(s.device for s in p.stages)) for p in job.pipelines), key=len)
    deepest, shallowest = pipelines[-1], pipelines[0]
    devices = {
        "first": shallowest[0],
        "last": shallowest[-1],
        "middle": deepest[len(deepest) // 2],
        "deepest": deepest[-1],
    }
    victim = devices[cell.victim]
    first = node_of(_head_beside(job, victim) if cell.evaluates and cell.phase == "reduce" else victim)
    chosen = [first]
    others = [n for p in job.pipelines for n in p.nodes if n != first]
    home = next(p for p in job.pipelines if first in p.nodes)
    others.sort(key=lambda n: (n in home.nodes, n))  # from another pipeline where that can be survived
    for node in others:
        bearable = cell.manner.policy in ROLLING_BACK or survivable(job, {*chosen, node})
        if len(chosen) < cell.count and bearable:
            chosen.append(node)
    assert len(chosen) == cell.count, f"no {cell.count} nodes of {job.id} can die together"
    return chosen


def _head_beside(job: JobView, device: str) -> str:
    """The device of its pipeline that has the losses: nobody else sends anything in an evaluation."""
    stages = next(p.stages for p in job.pipelines if device in {s.device for s in p.stages})
    return max(stages, key=lambda stage: stage.stop).device


def survivable(job: JobView, dead: set[str]) -> bool:
    """Whether every layer keeps a holder when the nodes ``dead`` are gone."""
    held = [
        s
        for p in job.pipelines
        for s in p.stages
        if node_of(s.device) not in dead and s.device not in p.vacant
    ]
    top = max(s.stop for p in job.pipelines for s in p.stages)
    return all(any(s.start <= layer < s.stop for s in held) for layer in range(top))


def run_cell(cluster: Cluster, cell: Cell) -> JobView:
    """Carry out ``cell``; returns the finished job. AssertionError says what broke.

    One node of the cluster, the *guest*, is drained meanwhile: the plan changes when it comes and goes, also
    where no other node could be spared.
    """
    cluster.usable(cluster.num_nodes)
    guest = max(node.name for node in cluster.client.nodes())
    drain(cluster, guest)
    try:
        if cell.evaluates:
            return _die_in_evaluation(cluster, cell)
        if (cell.phase, cell.victim) in PRECOPYING:
            return die_in_precopy(cluster, cell.phase, cell.victim, cell.manner)
        return _run_cell(cluster, cell, guest)
    finally:
        if any(n.name == guest and n.state in {"draining", "drained"} for n in cluster.client.nodes()):
            cluster.client.undrain(guest, "matrix")


def _run_cell(cluster: Cluster, cell: Cell, guest: str) -> JobView:
    moving = cell.phase in MOVE_PHASES
    before = len(cluster.fired())
    train = MOVING_TRAIN if moving else {"steps": STEPS * (2 if cell.phase in _OF_EARLY else 1)}
    data = data_of(cell.data, cluster.state)
    job = cluster.client.submit(
        tiny_job(cell.name[:_MAX_NAME], train=train, data=data, **cell.manner.tables())
    ).id
    view = cluster.at_step(job, 1)
    cell.manner.check(view)
    doomed = victims(view, cell)
    if _by_returning(cell):
        _return_until_fired(cluster, cell, doomed, before)
    else:
        for node in doomed:
            cluster.client.kill(node, "device", at=cell.phase, round=0 if moving else view.step + AHEAD)
    if moving and not _by_returning(cell):
        _move_until_fired(cluster, view, cell, doomed, before, guest)
    done = cluster.job_in(job, "done")
    hits = cluster.fired()[before:]
    assert set(doomed) <= _died(hits, cell), f"{cell.name}: {doomed} were to die, but only {hits} fired"
    incidents = [i for i in cluster.client.incidents() if i.job == job]
    kept = cell.manner.policy not in ROLLING_BACK
    assert done.steps_lost == (0 if kept else sum(i.steps_lost for i in incidents)), done
    assert done.step == done.steps
    cluster.verify(job)
    if not moving:
        _check_redone(cluster, view, doomed, cell)
    return done


def _die_in_evaluation(cluster: Cluster, cell: Cell) -> JobView:
    before, tables = len(cluster.fired()), cell.manner.tables()
    if cell.phase == "checkpoint":  # there has to be room for the copy that one is written from
        tables = cell.manner.tables(saving=True)
        tables |= {"checkpoint": {"every": EVALUATES_EVERY}}
    data, evaluation = data_of(cell.data, cluster.state), eval_of(cell.data, cluster.state)
    spec = tiny_job(cell.name[:_MAX_NAME], train={"steps": STEPS}, data=data, eval=evaluation, **tables)
    job = cluster.client.submit(spec).id
    view = cluster.at_step(job, 1)
    cell.manner.check(view)
    doomed = victims(view, cell)
    ahead = range(view.step + AHEAD - 1, STEPS)
    # In the last round of an evaluation some devices have nothing to do.
    round_ = rounds_of_evaluation(spec, ahead.start)[-2]
    within: Collection[int] = (round_,)
    if cell.phase == "checkpoint":
        # That of the boundary before an evaluation is written in its first round; of a later one, where the
        # checkpoint before is still being written then.
        due = [step for step in ahead if spec.eval_rounds.due(step)]
        within = {rounds_of_evaluation(spec, step).start for step in due}
    wanted = [(doomed[0], "forward" if cell.phase == "frozen" else cell.phase, within)]
    if cell.phase == "frozen":  # of one that may not have heard the last vote of the round before
        wanted.append((doomed[1], "frozen", (round_ - 1, round_)))
    for node, phase, rounds in wanted:
        cluster.client.kill(node, "device", at=phase, round=min(rounds))
    done = cluster.job_in(job, "done")
    hits = {(node_of(hit["device"]), hit["point"]): hit["round"] for hit in cluster.fired()[before:]}
    as_wanted = [hits.get((node, phase), -1) in within for node, phase, within in wanted]
    assert len(hits) == len(wanted), f"{cell.name}: {wanted} were to die, {hits} fired"
    assert all(as_wanted), f"{cell.name}: {wanted} were to die, {hits} fired"
    incidents = [i for i in cluster.client.incidents() if i.job == job]
    assert incidents, "no incident was opened"
    if cell.manner.policy not in ROLLING_BACK:
        assert done.steps_lost == 0, done
        assert all(i.layer_gradients == 0 for i in incidents), incidents
    number = len(spec.eval_sources) * sum(map(spec.eval_rounds.due, range(STEPS + 1)))
    assert f"{number} of {number} evaluations" in cluster.verify(job)
    return done


def rounds_of_evaluation(job: Job, step: int) -> range:
    """The rounds of the first evaluation after ``step`` steps or more, where no step is made twice."""
    counters, rounds = Counters(), job.eval_rounds
    while not (rounds.evaluates(counters) and counters.step >= step):
        counters = counters.after("evaluated" if rounds.evaluates(counters) else "applied")
    return range(counters.round, counters.round + rounds.num_rounds)


def _died(hits: Sequence[dict[str, Any]], cell: Cell) -> set[str]:
    return {node_of(str(hit["device"])) for hit in hits if hit["point"] == cell.phase}


def _by_returning(cell: Cell) -> bool:
    """Whether the doomed are to leave and come back: policies that re-route copy to whoever comes, and hardly
    to anybody else.
    """
    return cell.phase == "copy" and cell.manner.policy in REROUTING


def _return_until_fired(cluster: Cluster, cell: Cell, doomed: Sequence[str], before: int) -> None:
    """They die of the layers that they get back."""
    for node in doomed:
        drain(cluster, node)
        cluster.client.kill(node, "device", at=cell.phase, round=0)
    for node in doomed:
        cluster.client.undrain(node, "matrix")
    cluster.until(
        lambda: set(doomed) <= _died(cluster.fired()[before:], cell) or None, f"{doomed} to die on their way"
    )


def _move_until_fired(
    cluster: Cluster, view: JobView, cell: Cell, doomed: Sequence[str], before: int, guest: str
) -> None:
    """Deploy and copy happen when the plan changes: nodes that come and go, one after the other, make it
    change.
    """

    def fired() -> bool:
        return set(doomed) <= _died(cluster.fired()[before:], cell)

    # Where state goes by a checkpoint no copy need be left; and who is back may have no use, and stand by.
    rolls_back = cell.manner.policy in ROLLING_BACK
    others = [n for p in view.pipelines for n in p.nodes if n not in doomed]
    spared = [n for n in others if rolls_back or survivable(view, {*doomed, n})]
    back = partial(undrain, states=("active", "standby")) if rolls_back else undrain
    moves = [back, drain, *([drain, back] * len(spared))]
    movers = [guest, guest, *(n for n in spared for _ in range(2))]
    for move, node in [*zip(moves, movers, strict=True)] * 3:
        move(cluster, node, fired)
        if fired():
            return


def drain(cluster: Cluster, node: str, over: Callable[[], bool] = lambda: False) -> None:
    """Drain ``node`` and wait until it is, or until ``over``."""
    cluster.client.drain(node, "matrix")
    _await_state(cluster, node, ("drained",), over)


def undrain(
    cluster: Cluster,
    node: str,
    over: Callable[[], bool] = lambda: False,
    states: Sequence[str] = ("active",),
) -> None:
    """Have ``node`` back and wait until it is in one of ``states``, or until ``over``."""
    cluster.client.undrain(node, "matrix")
    _await_state(cluster, node, states, over)


def _await_state(cluster: Cluster, node: str, states: Sequence[str], over: Callable[[], bool]) -> None:
    def check() -> bool | None:
        now = {n.name: n.state for n in cluster.client.nodes()}
        return over() or now[node] in states or None

    cluster.until(check, f"{node} to be {' or '.join(states)}")


def _check_redone(cluster: Cluster, view: JobView, doomed: Sequence[str], cell: Cell) -> None:
    """Only what died with the victims, or was routed over them, was computed again."""
    layers = max(stage.stop for p in view.pipelines for stage in p.stages)
    most = 0
    for node in doomed:  # two that die in different rounds each cost the share of their pipeline
        most += sum(len(p.micro_batches) for p in view.pipelines if node in p.nodes) * layers
    if cell.manner.policy in REROUTING:
        most *= len(doomed)  # the second may have had what was routed around the first
    incidents = [i for i in cluster.client.incidents() if i.job == view.id]
    assert incidents, "no incident was opened"
    assert all(i.layer_gradients <= most for i in incidents), (most, incidents)


__all__ = [
    "AHEAD",
    "MOVING_TRAIN",
    "NODES",
    "Cell",
    "all_cells",
    "drain",
    "eval_cells",
    "every_cell",
    "on_all_data",
    "pairwise",
    "precopy_cells",
    "rounds_of_evaluation",
    "run_cell",
    "some_precopy_cells",
    "survivable",
    "undrain",
]
