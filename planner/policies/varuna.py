"""Policy ``varuna``: rollback to the checkpoint, and on with the best depth x width for the nodes at hand
(Varuna, EuroSys'22).

Owns the choice of the shape, *job morphing* (Varuna, sections 4.3 and 5): all pipelines have one depth P,
there are D of them, P x D nodes work and the rest stand idle. Every shape is scored by its modelled step. No
layer is copied from device to device: what a plan needs is loaded from a checkpoint, so a change of nodes
that forces nobody must pay for the stop. Which checkpoint, and how far back it lies, is the core's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from oobleckd.planner.costs.model import copy_bytes
from oobleckd.planner.placement.transfer import recompute_on
from oobleckd.planner.plan import Plan, Template
from oobleckd.planner.policies.cases import Nodes, listed
from oobleckd.planner.policies.oobleck import Oobleck, pipelines_of, steps_of
from oobleckd.planner.policy import REROUTING, ROLLING_BACK, Action, Proposal, Rejected, Setup, Situation, Way
from oobleckd.planner.sizing.exchanged import exchange_s, exchanges_s
from oobleckd.planner.sizing.instantiate import split_micro_batches, too_few
from oobleckd.planner.templates.fewest import fewest_recomputing
from oobleckd.words import count, seconds, than

SHAPES_SHOWN = 2


@dataclass(frozen=True, slots=True)
class VarunaShape:
    """``width`` pipelines of ``depth`` nodes: the modelled seconds of a step, of the stop before the first
    (``stop_s``), and of both together over ``horizon_steps``.
    """

    depth: int
    width: int
    step_s: float
    stop_s: float
    horizon_steps: float

    @property
    def cost_s(self) -> float:
        """The stop, and the steps until the next loss."""
        return self.stop_s + self.horizon_steps * self.step_s

    def rank(self) -> tuple[float, int, int]:
        """Less is better: cost, to the nanosecond; then more copies; then fewer nodes."""
        return round(self.cost_s, 9), -self.width, self.depth

    def __str__(self) -> str:
        return f"{count(self.width, 'pipeline')} of {count(self.depth, 'node')}"


class Varuna:
    """Checkpoint and job morphing."""

    name = "varuna"
    reroutes = name in REROUTING
    rolls_back = name in ROLLING_BACK

    def prepare(self, setup: Setup) -> tuple[Template, ...]:
        """Templates for every depth from n0 nodes on. ``f`` bounds none of them: a loss leads to the
        checkpoint, not to a copy.

        Raises PlanError when no number of nodes fits.
        """
        # D copies are there, but every loss rolls back: a number above 0 would promise what the policy does
        # not do. (D-policies-003)
        return Oobleck().prepare(msgspec.structs.replace(setup, f=0))

    def adapt(
        self,
        setup: Setup,
        templates: tuple[Template, ...],
        situation: Situation,
        sizes: tuple[int, ...] = (),  # noqa: ARG002 - they are those of pipelines of different depth
    ) -> Proposal:
        """The shape of least modelled cost, the stop plus the steps until the next loss; the one at work,
        which needs no stop, if all its nodes may be used and no other is so much faster. Nothing is ever
        transferred.

        Raises PlanError when there are fewer than n0 nodes.
        """
        by_depth = {template.num_nodes: template for template in templates}
        nodes = tuple(sorted(set(situation.nodes)))
        if len(nodes) < min(by_depth):
            raise too_few(len(nodes), min(by_depth), fewest_recomputing(setup, min(by_depth)))
        best = [
            min(of_depth, key=VarunaShape.rank)
            for of_depth in _shapes(setup, by_depth, situation, len(nodes))
        ]
        best.sort(key=VarunaShape.rank)
        working = _working(setup, by_depth, situation)
        # Every change of shape is a stop of the whole job, so it must save more than writing and loading
        # take. What forces one, a loss or a drain, is not weighed. (D-policies-004)
        if working is not None and working.rank() <= best[0].rank():
            found = _proposal(setup, by_depth, working, situation.running, nodes, best)
            return msgspec.structs.replace(found, actions=(Action("keep"),))
        chosen = best[0]
        placed = tuple(
            nodes[first : first + chosen.depth]
            for first in range(0, chosen.width * chosen.depth, chosen.depth)
        )
        others = [*best[1:], *([working] if working is not None else [])]
        found = _proposal(setup, by_depth, chosen, placed, nodes, sorted(others, key=VarunaShape.rank))
        return found if situation.running else msgspec.structs.replace(found, actions=(Action("start"),))


# ---------------------------------------------------------------------- shapes


def _shapes(
    setup: Setup, by_depth: Mapping[int, Template], situation: Situation, num_nodes: int
) -> Iterator[list[VarunaShape]]:
    """For every depth that ``num_nodes`` nodes allow all widths at which each pipeline has a micro-batch."""
    horizon_steps = situation.horizon_steps
    for depth, template in sorted(by_depth.items()):
        stop_s = _stop_s(setup, template)
        widths = range(1, min(num_nodes // depth, setup.num_micro_batches) + 1)
        more_s = exchanges_s(setup, template, widths).tolist()
        found = [
            VarunaShape(depth, width, _passes_s(setup, template, width) + each_s, stop_s, horizon_steps)
            for width, each_s in zip(widths, more_s, strict=True)
        ]
        if found:
            yield found


def _passes_s(setup: Setup, template: Template, width: int) -> float:
    """A step without its exchange: of equal pipelines the one with most micro-batches is the slowest."""
    return template.time_s(-(-setup.num_micro_batches // width))


def _stop_s(setup: Setup, template: Template) -> float:
    """Writing a checkpoint and loading it, all devices at once: the one with most state decides."""
    profile = setup.profile
    return 2 * (profile.link_latency_s + _load_bytes(setup, template) / profile.link_bytes_per_s)


def _load_bytes(setup: Setup, template: Template) -> int:
    """The most that a device loads from a checkpoint."""
    layers = setup.profile.layers
    return max(sum(copy_bytes(layers[layer]) for layer in held.layers()) for held in template.held)


def _working(setup: Setup, by_depth: Mapping[int, Template], situation: Situation) -> VarunaShape | None:
    """The shape at work, if its nodes may all be used and hold their layers; it needs no stop."""
    running, usable = situation.running, frozenset(situation.nodes)
    depths = {len(nodes) for nodes in running}
    if len(depths) != 1 or not usable.issuperset(node for nodes in running for node in nodes):
        return None
    depth = min(depths)
    if depth not in by_depth:
        return None
    if _plan(setup, by_depth[depth], running).holdings() != situation.holdings:
        return None
    template, width = by_depth[depth], len(running)
    step_s = _passes_s(setup, template, width) + exchange_s(setup, template, width)
    return VarunaShape(depth, len(running), step_s, 0.0, situation.horizon_steps)


def _plan(setup: Setup, template: Template, placed: tuple[Nodes, ...]) -> Plan:
    members = [template] * len(placed)
    shares = split_micro_batches(members, setup.num_micro_batches)
    pipelines = pipelines_of(members, placed, shares, dealt=setup.dealt)
    return Plan(pipelines, recompute=recompute_on(members, placed))


# ---------------------------------------------------------------------- what is said of it


def _proposal(
    setup: Setup, by_depth: Mapping[int, Template], chosen: VarunaShape, placed: tuple[Nodes, ...],
    nodes: Nodes,
    others: list[VarunaShape],
) -> Proposal:  # fmt: skip
    working = frozenset(node for pipeline in placed for node in pipeline)
    idle = tuple(node for node in nodes if node not in working)
    template = by_depth[chosen.depth]
    reason = _reason(setup, template, chosen, idle)
    plan = msgspec.structs.replace(
        _plan(setup, template, placed), idle=idle, step_s=chosen.step_s, reason=reason
    )
    other = [shape for shape in others if (shape.depth, shape.width) != (chosen.depth, chosen.width)]
    rejected = tuple(_rejected(chosen, shape) for shape in other[:SHAPES_SHOWN])
    return Proposal(plan, (), chosen.cost_s, reason, rejected, way=_way(chosen))


def _rejected(chosen: VarunaShape, other: VarunaShape) -> Rejected:
    extra_s = round(other.cost_s - chosen.cost_s, 9)
    over = steps_of(chosen.horizon_steps)
    more = f"{than(extra_s)} over {over}" if extra_s else "no faster, fewer copies"
    stop = f", after a stop of {seconds(other.stop_s)}" if other.stop_s else ""
    return Rejected(
        str(other), other.cost_s, f"{more}: step {seconds(other.step_s)}{stop}", _way(other),
        "cost" if extra_s else "fewer-pipelines", step_s=other.step_s,
    )  # fmt: skip


def _way(shape: VarunaShape) -> Way:
    return "morph" if shape.stop_s else "stay"


def _reason(setup: Setup, template: Template, chosen: VarunaShape, idle: Nodes) -> str:
    """One sentence: the shape, what it costs, who stands idle, what a loss means."""
    what = "keep" if not chosen.stop_s else "morph"
    parts = [f"{what}: {chosen}, step {seconds(chosen.step_s)} as modelled"]
    if chosen.stop_s:
        parts.append(f"each device loads up to {_load_bytes(setup, template) / 1e6:,.1f} MB")
    if idle:
        names = f"{listed(idle)} {'are' if len(idle) > 1 else 'is'} idle"
        parts.append(f"{names}: depth x width is {chosen.depth} x {chosen.width}, and no other shape pays")
    parts.append(
        f"{count(chosen.width, 'copy')} of every layer; can lose 0 without rolling back to the checkpoint"
    )
    return "; ".join(parts)
