"""What would follow if nodes died now: a preview in full, and in a line for the overview. Pure.

The daemon computes it with the job's own policy; here it is only put into words.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from oobleckd.console.model import View
from oobleckd.console.widgets.nodes import natural
from oobleckd.draw.lines import Line, Role, cell, clipped, flow, wrapped
from oobleckd.protocol.api import LayerRange, NodeView
from oobleckd.protocol.watch import ImpactView
from oobleckd.words import count, layers, seconds, size

DEPENDS = ("impacts", "refused", "job", "nodes", "layers")
CANDIDATES, MANY_CANDIDATES = 3, 12
_FEW_NODES = 64
"""Up to so many nodes the daemon may be asked about more of them: it plans for each."""
_INDENT = 3
_NAME = 12


def paint(view: View, now: float, width: int, height: int, nodes: Sequence[str] = ()) -> list[Line]:
    """Of ``nodes``: the verdict, its price, what is left, the plan that would follow, and the
    ways not taken.
    """
    if not nodes:
        return ranking(view, now, width, height)
    impact = view.impact(nodes)
    if impact is None:
        problem = view.refusal("impact")
        said = f"the daemon has no answer: {problem}" if problem else "the daemon is thinking …"
        if view.tape is not None:
            said = "what would have followed then is not kept; esc comes back to now"
        return [clipped(((said, "warn" if problem else "dim"),), width)][:height]
    lines = [verdict(impact), *flow(_numbers(impact), width)]
    lines += [((text, ""),) for text in wrapped(impact.reason, width, 3)]
    for pipeline in impact.plan:
        stages = "│".join(
            f"{stage.device.rpartition('/')[0]} {layers(stage.start, stage.stop)}"
            for stage in pipeline.stages
        )
        lines.append(
            (
                (f" P{pipeline.index:<3} ", "strong"),
                (f"{len(pipeline.micro_batches)} mb  ", ""),
                (stages, "dim"),
            )
        )
    for other in impact.rejected:
        lines.append(((f" ✗ {other.what}, {seconds(other.cost_s)}: ", "dim"), (other.why, "dim")))
    return [clipped(line, width) for line in lines][:height]


def ranking(view: View, _now: float, width: int, height: int) -> list[Line]:
    """What the loss of each of those that matter most would cost, one alone."""
    asked = candidates(view, many=True)
    known = [impact for names in asked if (impact := view.impact(names)) is not None]
    if not known:
        said = (
            "what follows is not kept of the past"
            if view.tape is not None
            else "mark nodes to see what follows"
        )
        return [clipped(((said, "dim"),), width)][:height]
    lines: list[Line] = [
        clipped((("mark nodes to see what follows when they die", "dim"),), width),
        clipped((("the loss of one of these alone, now:", ""),), width),
    ]
    for impact in known:
        lines.append(
            clipped(((f" {cell(', '.join(impact.nodes), _NAME)} ", "strong"), *verdict(impact)), width)
        )
        numbers = flow(_numbers(impact), width - _INDENT)
        lines += [clipped(((" " * _INDENT, ""), *line), width) for line in numbers]
    return lines[:height]


def verdict(impact: ImpactView) -> Line:
    """The worst that follows, in a few words."""
    if impact.stops:
        return ((" the job stops ", "banner-bad"), (" too few nodes would be left", "bad"))
    if impact.lost_layers:
        lost = f" the last copies of {count(len(impact.lost_layers), 'layer')} are lost"
        return ((f" back {count(impact.steps_back, 'step')} ", "banner-bad"), (lost, "bad"))
    return ((" no step is lost ", "banner-dim"), (f" {throughput(impact)} of the throughput stays", ""))


def throughput(impact: ImpactView) -> str:
    """``"97.8 %"``."""
    return f"{impact.throughput:.1%}"


def harmful(impact: ImpactView | None) -> bool:
    """Whether it stops the job or takes it back. What is not known counts as harmful."""
    return impact is None or impact.stops or bool(impact.lost_layers) or impact.steps_back > 0


def _numbers(impact: ImpactView) -> list[Line]:
    role: Role = "bad" if impact.can_lose == 0 else "good"
    return [
        (("stall ", "dim"), (seconds(impact.stall_s), "strong")),
        (("copies ", "dim"), (size(impact.copied_bytes), "strong"), (f" in {seconds(impact.copy_s)}", "")),
        (("throughput then ", "dim"), (throughput(impact), "strong")),
        (("could still lose ", "dim"), (str(impact.can_lose), role)),
    ]


# --------------------------------------------------------------------------- the overview's line


def candidates(view: View, *, many: bool = False) -> tuple[tuple[str, ...], ...]:
    """Nodes whose loss is asked for: those whose layers have the fewest copies come first. ``many``: more of
    them, in a small cluster.
    """
    wanted = MANY_CANDIDATES if many and len(view.nodes) <= _FEW_NODES else CANDIDATES
    copies = {layer.layer: layer.copies for layer in view.layers}
    fewest: dict[tuple[int, int], int] = {}  # of a stage, which a node of each pipeline holds

    def least(held: LayerRange) -> int:
        stage = held.start, held.stop
        if stage not in fewest:
            fewest[stage] = min((copies.get(layer, 0) for layer in range(*stage)), default=0)
        return fewest[stage]

    def risk(node: NodeView) -> tuple[int, tuple[tuple[int, str], ...]]:
        return min(map(least, node.layers)), natural(node.name)

    at_work = (node for node in view.nodes if node.state == "active" and node.layers)
    return tuple((node.name,) for node in nsmallest(wanted, at_work, key=risk))


def line(view: View, width: int, asked: Sequence[tuple[str, ...]]) -> Line:
    """``a failure now would cost n013: 0.9 % n089: 12 steps`` for each of the sets ``asked`` for; empty while
    nothing is known.
    """
    spans: list[tuple[str, Role]] = []
    for nodes in asked:
        impact = view.impact(nodes)
        if impact is not None:
            spans.append((f"  {', '.join(nodes)}: ", "strong"))
            spans.append(_cost(impact))
    return clipped((("a failure now would cost", "dim"), *spans), width) if spans else ()


def _cost(impact: ImpactView) -> tuple[str, Role]:
    if impact.stops:
        return ("the job stops", "bad")
    if impact.steps_back:
        return (f"{count(impact.steps_back, 'step')} (sole copy)", "bad")
    return (f"{1 - impact.throughput:.1%} and {seconds(impact.stall_s)}", "")
