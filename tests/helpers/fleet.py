"""A cluster that trains, of any size, as the daemon lists it: nodes, pipelines, templates, layers, op times,
steps.

For pictures, snapshots and benchmarks of the console. Everything is a function of the fleet's shape, so that
two runs show the same; it owns no plan (``planner`` has those) and no daemon (``api_server`` serves what is
made here).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from oobleckd.protocol.evalviews import EvaluationView
from oobleckd.protocol.jobviews import (
    CurveBin,
    JobView,
    PipelineView,
    ProgressView,
    StepTimes,
    StepView,
    TemplateView,
)
from oobleckd.protocol.nodeviews import DeviceFigures, LayerRange, NodeState, NodeView
from oobleckd.protocol.watch import CurveView, GoodputView, LaneView, LayerView, OpKind, OpView, ScheduleView
from tests.helpers.api_server import job_spec, job_view, node_view

JOB = "job-1"
LAYERS = 50  # an embedding, 48 blocks, a head
NODES_IN_RACK = 8
_MEMORY = 1 << 30
_SLOT_S = 0.0125  # of a forward pass, or of either half of a backward pass
_UPDATE_SLOTS = 2
_SEQUENCE = 1024
_STEPS = 20_000
_WARMUP = 500
# Micro-batches of a pipeline of so many nodes: all are done about as long.
_SHARES = {3: 5, 4: 7, 5: 9, 6: 10}
_PEERS = 6  # so many share what a dead device does not do


@dataclass(frozen=True)
class Fleet:
    """Pipelines of so many nodes each, one stage a node; ``standby`` nodes wait; ``f`` losses must be
    survived.
    """

    sizes: tuple[int, ...]
    standby: int = 0
    f: int = 2

    @property
    def num_nodes(self) -> int:
        """All nodes."""
        return sum(self.sizes) + self.standby

    @cached_property
    def names(self) -> tuple[str, ...]:
        """``n0000``, as many digits as are needed, those of the pipelines in order, then the
        standby nodes.
        """
        digits = max(3, len(str(self.num_nodes)))
        return tuple(f"n{number:0{digits}}" for number in range(self.num_nodes))

    @cached_property
    def homes(self) -> tuple[tuple[str, ...], ...]:
        """The nodes of each pipeline."""
        found, at = [], 0
        for size in self.sizes:
            found.append(self.names[at : at + size])
            at += size
        return tuple(found)

    # ------------------------------------------------------------------ what is listed

    @cached_property
    def pipelines(self) -> tuple[PipelineView, ...]:
        """All of the plan."""
        found, first = [], 0
        for index, nodes in enumerate(self.homes):
            numbers = tuple(range(first, first + _SHARES[len(nodes)]))
            found.append(PipelineView(index, nodes, _stages(nodes), numbers))
            first += len(numbers)
        return tuple(found)

    @property
    def batch(self) -> int:
        """Micro-batches of a step, of one sample each."""
        return sum(_SHARES[size] for size in self.sizes)

    def nodes(self, states: Mapping[str, tuple[NodeState, str]] | None = None) -> tuple[NodeView, ...]:
        """All nodes, healthy but for ``states``: the state, and its reason."""
        held = {stage.device.split("/")[0]: stage for line in self.pipelines for stage in line.stages}
        found = []
        # A pipeline lies across racks, so that a rack is one stage of each of several.
        racks = math.ceil(self.num_nodes / NODES_IN_RACK)
        for number, name in enumerate(self.names):
            usual: NodeState = "active" if name in held else "standby"
            state, reason = (states or {}).get(name, (usual, ""))
            layers = (held[name],) if name in held and state == "active" else ()
            age_s = 4.0 if state == "disconnected" else 0.05 + number * 7 % 20 / 100
            found.append(
                node_view(
                    name, state=state, reason=reason, host=f"host-{name}", kinds=("NVIDIA H100",),
                    layers=layers,
                    heartbeat_age_s=age_s, zone=f"r{number % racks:02}",
                    figures=self.figures(number) if state in {"active", "standby"} else (),
                )
            )  # fmt: skip
        return tuple(found)

    def layers(self, without: Collection[str] = ()) -> tuple[LayerView, ...]:
        """Who holds each layer, but for nodes that died."""
        holders: list[list[str]] = [[] for _ in range(LAYERS)]
        for pipeline in self.pipelines:
            for stage in pipeline.stages:
                if stage.device.split("/")[0] not in without:
                    for layer in range(stage.start, stage.stop):
                        holders[layer].append(stage.device)
        return tuple(LayerView(layer, len(held), tuple(held)) for layer, held in enumerate(holders))

    def templates(self) -> tuple[TemplateView, ...]:
        """One for each size from three nodes to one more than the largest in use."""
        found = []
        for size in range(3, max(*self.sizes, 4) + 2):
            period_s = 3 * _SLOT_S * 4 / size
            whole_s = max(ops[-1].stop_s for ops in _ops(size, _SHARES[size], 0))
            stages = tuple((stage.start, stage.stop) for stage in _stages(("n",) * size))
            memory = tuple(_MEMORY * 72 // size for _ in range(size))
            fill_s = whole_s - (_SHARES[size] - 1) * period_s
            found.append(TemplateView(size, stages, fill_s, period_s, memory, self.sizes.count(size)))
        return tuple(found)

    # ------------------------------------------------------------------ the job

    def job(self, **changes: Any) -> JobView:
        """The job on it, running."""
        step_s = self.span_s
        spec = job_spec(
            name="gpt2-xl",
            train={"steps": _STEPS, "global_batch": self.batch, "micro_batch": 1, "sequence": _SEQUENCE},
            fault_tolerance={"f": self.f, "policy": "adaptive"},
        )
        usual: dict[str, Any] = {
            "id": JOB, "spec": spec, "state": "running", "step": 12_480, "steps": _STEPS, "epoch": 3,
            "loss": self.loss(12_480),
            "tolerance": self.f, "f": self.f, "policy": "adaptive", "samples_per_s": self.batch / step_s,
            "step_s": step_s,
            "incidents": 1, "finished_at": None, "checkpoint_step": 12_400, "nodes": self.names,
        }  # fmt: skip
        step = changes.get("step", usual["step"])
        return job_view(**({"progress": self.progress(step)} | usual | changes))

    def loss(self, step: int) -> float:
        """A curve as training has it: falling, and uneven by noise that is the same each time."""
        noise = step * 2_654_435_761 % 2**32 / 2**32 - 0.5  # Knuth's multiplicative hash
        return 2.45 + 3.6 * math.exp(-step / 2_400) + 0.05 * noise

    def steps(
        self,
        last: int,
        until: float,
        count: int = 600,
        *,
        step_s: float = 0.0,
        gap: tuple[float, float] = (0.0, 0.0),
    ) -> tuple[StepView, ...]:
        """The newest ``count`` steps; the ``last`` one was committed at ``until``.

        ``step_s``: of each (0: as planned); ``gap``: so many seconds ago nothing was committed for so many.
        """
        step_s = step_s or self.span_s
        ago_s, length_s = gap
        found = []
        for step in range(max(1, last - count + 1), last + 1):
            before_s = (last - step) * step_s
            at = until - before_s - (length_s if before_s > ago_s else 0.0)
            loss = self.loss(step)
            found.append(
                StepView(step, loss, loss.hex(), 1.0, 3e-4, self.batch, "full", "applied", 3, at, step_s)
            )
        return tuple(found)

    def curve(self, last: int, *, evaluated: bool = False) -> CurveView:
        """The whole run in parts that grow with their place."""
        bins, first = [], 1
        while first <= last:
            stop = min(last + 1, first + 1 + first // 30)
            bins.append(self._bin(first, stop - 1))
            first = stop
        found = tuple(
            EvaluationView(step, self.loss(step) + 0.06, (), 1, 0.0, 1.0)
            for step in range(500, last + 1, 500)
            if evaluated
        )
        return CurveView(JOB, last, tuple(bins), log=True, evaluations=found)

    def _bin(self, first: int, last: int) -> CurveBin:
        """Of every step, but of those of a wide part only some."""
        steps = range(first, last + 1, 1 + (last - first) // 30)
        losses = [self.loss(step) for step in steps]
        norms = [0.4 + 6.0 / (1 + step / 60) + 0.2 * (step * 40_503 % 97) / 97 for step in steps]
        rates = [self.tokens_per_s * (0.96 + 0.05 * (step * 40_503 % 89) / 89) for step in steps]
        lrs = [_rate_of(step) for step in steps]
        return CurveBin(
            first, last, last - first + 1, 0, sum(losses) / len(losses), min(losses), max(losses),
            self.span_s, self.span_s, self.span_s, lrs[-1], sum(norms) / len(norms), min(norms), max(norms),
            min(lrs), max(lrs), sum(rates) / len(rates), min(rates), max(rates),
        )  # fmt: skip

    @property
    def tokens_per_s(self) -> float:
        """At full speed."""
        return self.batch * _SEQUENCE / self.span_s

    def progress(self, step: int, goodput: float = 0.998) -> ProgressView:
        """How far the job is after so many steps, and how fast."""
        tokens = self.batch * _SEQUENCE
        times = StepTimes(
            600, self.span_s, 1.08 * self.span_s, 1.31 * self.span_s, 3.9 * self.span_s,
            tuple(round(self.span_s * share, 4) for share in (0.96, 0.98, 1.0, 1.02, 1.05, 1.1, 1.3, 4.0)),
            (4, 61, 233, 187, 74, 29, 9, 3), f"{self.names[-1 - self.standby]}/0", 1.07,
        )  # fmt: skip
        return ProgressView(
            elapsed_s=step * self.span_s * 1.07, left_s=(_STEPS - step) * self.span_s, tokens=step * tokens,
            total_tokens=_STEPS * tokens, passes=step / 7_900, tokens_per_s=self.tokens_per_s,
            flops_per_token=1e10, peak_flops=self.num_nodes * 9.89e14, peak_of="h100-sxm, bf16", mfu=0.384,
            goodput=goodput, step_times=times,
        )  # fmt: skip

    def figures(self, number: int) -> tuple[DeviceFigures, ...]:
        """What the device of the ``number``-th node says of itself."""
        share = 0.62 + number * 13 % 30 / 100
        return (
            DeviceFigures(
                f"{self.names[number]}/0", 0.0, rss_bytes=(9 + number % 3) << 30,
                used_bytes=int(share * (80 << 30)), planned_bytes=60 << 30, total_bytes=80 << 30,
                card="NVIDIA H100 80GB HBM3", utilisation=0.87 + number * 7 % 12 / 100,
                power_w=610.0 + number * 11 % 80, power_limit_w=700.0, temperature_c=58 + number * 5 % 24,
                clock_mhz=1_980 if number % 5 != 3 else 1_410, clock_max_mhz=1_980,
                throttled=("thermal",) if number % 5 == 3 else (), ecc_corrected=number % 4,
                ecc_uncorrected=0, xids=(63,) if number == 8 else (),
            ),
        )  # fmt: skip

    def goodput(self, of_fault_free: float, at: float = 0.0, **lost_s: float) -> GoodputView:
        """Of two hours and ten minutes on all nodes; the best step was measured ``at``."""
        total_s = 7_800.0 * self.num_nodes
        usual: dict[str, float] = {"detect": 1.6, "plan": 0.2, "reconfigure": 2.4, "copy": 6.8, "redone": 1.1,
            "degraded": 0.0,
                                   "waiting": 0.0, "bubble": 0.079 * 7_800}  # fmt: skip
        lost: dict[Any, float] = {
            cause: spent_s * self.num_nodes for cause, spent_s in (usual | lost_s).items()
        }
        step_s = self.span_s
        best_s = of_fault_free * step_s
        return GoodputView(
            JOB, total_s, total_s - sum(lost.values()), lost, of_fault_free,
            step_s, best_s or step_s, at, step_s if best_s else 0.0, best_s, self.num_nodes,
        )  # fmt: skip

    # ------------------------------------------------------------------ op times

    @cached_property
    def span_s(self) -> float:
        """How long a step takes, in seconds."""
        return self.schedule(1, 0.0).span_s

    def schedule(
        self, step: int, at: float, *, measured: bool = True, dead: Collection[str] = ()
    ) -> ScheduleView:
        """A step by op times. Nodes that are ``dead`` died a third into it: peers of their stages do the
        rest.
        """
        lanes = [
            LaneView(
                f"{node}/0",
                index,
                (stage,),
                _numbered(ops[stage], self.pipelines[index].micro_batches[0]),
                0.0,
            )
            for index, nodes in enumerate(self.homes)
            for ops in (_ops(len(nodes), _SHARES[len(nodes)], index % 3 if measured else 0),)
            for stage, node in enumerate(nodes)
        ]
        for node in dead:
            lanes = _rerouted(lanes, f"{node}/0", {f"{other}/0" for other in dead})
        span_s = max(op.stop_s for lane in lanes for op in lane.ops)
        lanes = [_with_bubble(lane, span_s, dead=lane.device.partition("/")[0] in dead) for lane in lanes]
        return ScheduleView(JOB, step if measured else 0, 3, at, measured, span_s, tuple(lanes))


def thousand() -> Fleet:
    """A thousand nodes: 242 pipelines of three to five nodes, and four that wait."""
    return Fleet((3,) * 36 + (4,) * 142 + (5,) * 64, standby=4, f=10)


def of_nodes(count: int) -> Fleet:
    """About that many, in pipelines of four."""
    return Fleet((4,) * (count // 4), standby=count % 4, f=10)


def _rate_of(step: int) -> float:
    """The learning rate: a warm-up, then half a cosine."""
    warm, rest = step / _WARMUP, (step - _WARMUP) / (_STEPS - _WARMUP)
    return 3e-4 * (warm if step < _WARMUP else 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, rest))))


def _stages(nodes: tuple[str, ...]) -> tuple[LayerRange, ...]:
    cuts = [round(LAYERS * i / len(nodes)) for i in range(len(nodes) + 1)]
    return tuple(LayerRange(f"{node}/0", cuts[i], cuts[i + 1]) for i, node in enumerate(nodes))


# --------------------------------------------------------------------------- ops


@lru_cache
def _ops(stages: int, micro_batches: int, pace: int) -> tuple[tuple[OpView, ...], ...]:
    """Of every stage. ``pace``: so many per cent slower than planned, for a measured step is never as
    planned.
    """
    slot_s = _SLOT_S * 4 / stages * (1 + pace / 100)
    found = []
    for stage, slots in enumerate(_slots(stages, micro_batches)):
        ops = [
            OpView(kind, stage, number, slot * slot_s, (slot + 1) * slot_s) for slot, kind, number in slots
        ]
        end = ops[-1].stop_s
        found.append((*ops, OpView("U", -1, -1, end, end + _UPDATE_SLOTS * slot_s, early=stage == 0)))
    return tuple(found)


def _numbered(ops: tuple[OpView, ...], first: int) -> tuple[OpView, ...]:
    """The micro-batches of a pipeline are those from ``first`` on."""
    return tuple(
        OpView(op.kind, op.stage, op.micro_batch + first, op.start_s, op.stop_s, early=op.early)
        if op.micro_batch >= 0
        else op
        for op in ops
    )


def _slots(stages: int, micro_batches: int) -> list[list[tuple[int, OpKind, int]]]:
    """Slot, kind and micro-batch of every op of every stage, in slots of equal length.

    Decoupled backward (zero bubble, Qi et al. 2024, ZB-H1): input gradients as soon as they can be, forward
    passes while no more than a stage's share is in flight, weight gradients where there is nothing else.
    """
    done: dict[tuple[OpKind, int, int], int] = {}
    found: list[list[tuple[int, OpKind, int]]] = [[] for _ in range(stages)]
    next_of: list[dict[OpKind, int]] = [{"F": 0, "I": 0, "W": 0} for _ in range(stages)]
    slot = 0
    while any(stage["W"] < micro_batches for stage in next_of):
        for stage, counts in enumerate(next_of):
            forward, inputs, weights = counts["F"], counts["I"], counts["W"]
            before: tuple[OpKind, int, int] = (
                ("I", stage + 1, inputs) if stage < stages - 1 else ("F", stage, inputs)
            )
            kind: OpKind | None = None
            if inputs < micro_batches and done.get(before, slot) < slot and inputs < forward:
                kind = "I"
            elif (
                forward < micro_batches
                and forward - inputs < stages - stage
                and (stage == 0 or done.get(("F", stage - 1, forward), slot) < slot)
            ):
                kind = "F"
            elif weights < inputs:
                kind = "W"
            if kind is not None:
                done[kind, stage, counts[kind]] = slot
                found[stage].append((slot, kind, counts[kind]))
                counts[kind] += 1
        slot += 1
    return found


def _rerouted(lanes: list[LaneView], dead: str, gone: Collection[str]) -> list[LaneView]:
    """What ``dead`` does not do after a third of the step, devices of its stage in the next pipelines do when
    they wait.
    """
    victim = next(lane for lane in lanes if lane.device == dead)
    died_s = victim.ops[-1].stop_s / 3
    kept = tuple(op for op in victim.ops if op.stop_s <= died_s)
    rest = [op for op in victim.ops if op.stop_s > died_s and op.kind != "U"]
    sizes = Counter(lane.pipeline for lane in lanes)
    peers = [
        lane for lane in lanes
        if lane.stages == victim.stages and sizes[lane.pipeline] == sizes[victim.pipeline]
        and lane.device not in gone
    ]  # fmt: skip
    after = [lane for lane in peers if lane.pipeline > victim.pipeline]
    helping = (after or peers)[:_PEERS]
    changed = {dead: LaneView(dead, victim.pipeline, victim.stages, kept, 0.0, dead=True)}
    for number, peer in enumerate(helping):
        share = [op for op in rest if op.micro_batch % len(helping) == number]
        ops = _filled(peer.ops, share, died_s, dead)
        changed[peer.device] = LaneView(peer.device, peer.pipeline, peer.stages, ops, 0.0)
    return [changed.get(lane.device, lane) for lane in lanes]


def _filled(ops: Iterable[OpView], rest: list[OpView], after_s: float, origin: str) -> tuple[OpView, ...]:
    """``ops`` with ``rest`` in the gaps after ``after_s``, and what has no gap before the update."""
    found: list[OpView] = []
    waiting = list(rest)
    last_s = after_s
    for op in ops:
        while waiting and (op.kind == "U" or op.start_s - last_s >= _length(waiting[0]) * 0.99):
            moved = waiting.pop(0)
            start_s, last_s = last_s, last_s + _length(moved)
            found.append(OpView(moved.kind, moved.stage, moved.micro_batch, start_s, last_s, origin))
        start_s = max(op.start_s, last_s) if op.kind == "U" else op.start_s
        found.append(
            OpView(op.kind, op.stage, op.micro_batch, start_s, start_s + _length(op), early=op.early)
        )
        last_s = max(last_s, found[-1].stop_s)
    return tuple(found)


def _length(op: OpView) -> float:
    return op.stop_s - op.start_s


def _with_bubble(lane: LaneView, span_s: float, *, dead: bool) -> LaneView:
    busy_s = sum(map(_length, lane.ops))
    return LaneView(lane.device, lane.pipeline, lane.stages, lane.ops, max(0.0, 1 - busy_s / span_s), dead)
