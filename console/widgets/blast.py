"""What would follow if nodes died now: a preview in full, and in a line for the overview. Pure.

The daemon computes it with the job's own policy; here it is only put into words.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from oobleckd.console.model import View
from oobleckd.console.widgets.nodes import natural
from oobleckd.draw.lines import Line, Role, clipped, count, flow, layers, seconds, size, wrapped
from oobleckd.protocol.api import LayerRange, NodeView
from oobleckd.protocol.watch import BlastView

DEPENDS = ("blasts", "refused", "job", "nodes", "layers")
CANDIDATES = 3
_INDENT = 3


def paint(view: View, _now: float, width: int, height: int, nodes: Sequence[str] = ()) -> list[Line]:
    """Of ``nodes``: the verdict, its price, what is left, the plan that would follow, and the ways not taken."""
    if not nodes:
        return _ranking(view, width)[:height]
    blast = view.blast(nodes)
    if blast is None:
        problem = view.refusal("blast")
        said = f"the daemon has no answer: {problem}" if problem else "the daemon is thinking …"
        if view.tape is not None:
            said = "what would have followed then is not kept; esc comes back to now"
        return [clipped(((said, "warn" if problem else "dim"),), width)][:height]
    lines = [verdict(blast), *flow(_numbers(blast), width)]
    lines += [((text, ""),) for text in wrapped(blast.reason, width, 3)]
    for pipeline in blast.plan:
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
    for other in blast.rejected:
        lines.append(((f" ✗ {other.what}, {seconds(other.cost_s)}: ", "dim"), (other.why, "dim")))
    return [clipped(line, width) for line in lines][:height]


def _ranking(view: View, width: int) -> list[Line]:
    """Nothing is marked: what the loss of each of those that matter most would cost."""
    lines: list[Line] = [clipped((("mark nodes to see what follows when they die", "dim"),), width)]
    known = [blast for names in candidates(view) if (blast := view.blast(names)) is not None]
    if known:
        lines += [(), (("the loss of one of these alone, now:", ""),)]
    for blast in known:
        lines.append(clipped(((f" {', '.join(blast.nodes)}  ", "strong"), *verdict(blast)), width))
        lines += [
            clipped(((" " * _INDENT, ""), *line), width) for line in flow(_numbers(blast), width - _INDENT)
        ]
    return lines


def verdict(blast: BlastView) -> Line:
    """The worst that follows, in a few words."""
    if blast.stops:
        return ((" the job stops ", "banner-bad"), (" too few nodes would be left", "bad"))
    if blast.lost_layers:
        lost = f" the last copies of {count(len(blast.lost_layers), 'layer')} are lost"
        return ((f" back {count(blast.steps_back, 'step')} ", "banner-bad"), (lost, "bad"))
    return ((" no step is lost ", "banner-dim"), (f" {throughput(blast)} of the throughput stays", ""))


def throughput(blast: BlastView) -> str:
    """``"97.8 %"``."""
    return f"{blast.throughput:.1%}"


def harmful(blast: BlastView | None) -> bool:
    """Whether it stops the job or takes it back. What is not known counts as harmful."""
    return blast is None or blast.stops or bool(blast.lost_layers) or blast.steps_back > 0


def _numbers(blast: BlastView) -> list[Line]:
    role: Role = "bad" if blast.can_lose == 0 else "good"
    return [
        (("stall ", "dim"), (seconds(blast.stall_s), "strong")),
        (("copies ", "dim"), (size(blast.copied_bytes), "strong"), (f" in {seconds(blast.copy_s)}", "")),
        (("throughput then ", "dim"), (throughput(blast), "strong")),
        (("could still lose ", "dim"), (str(blast.can_lose), role)),
    ]


# --------------------------------------------------------------------------- the overview's line


def candidates(view: View) -> tuple[tuple[str, ...], ...]:
    """Nodes whose loss is asked for in the overview: those whose layers have the fewest copies come first."""
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
    return tuple((node.name,) for node in nsmallest(CANDIDATES, at_work, key=risk))


def line(view: View, width: int, asked: Sequence[tuple[str, ...]]) -> Line:
    """``a failure now would cost  n013: 0.9 %  n089: 12 steps`` for each of the sets ``asked`` for; empty while nothing is known."""
    spans: list[tuple[str, Role]] = []
    for nodes in asked:
        blast = view.blast(nodes)
        if blast is not None:
            spans.append((f"  {', '.join(nodes)}: ", "strong"))
            spans.append(_cost(blast))
    return clipped((("a failure now would cost", "dim"), *spans), width) if spans else ()


def _cost(blast: BlastView) -> tuple[str, Role]:
    if blast.stops:
        return ("the job stops", "bad")
    if blast.steps_back:
        return (f"{count(blast.steps_back, 'step')} (sole copy)", "bad")
    return (f"{1 - blast.throughput:.1%} and {seconds(blast.stall_s)}", "")
