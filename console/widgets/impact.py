"""What would follow if nodes died now: a preview in full, and in a line for the overview. Pure.

The daemon computes it with the job's own policy; here it is only put into words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest

from oobleckd.console.model import View
from oobleckd.console.widgets.nodes import natural
from oobleckd.draw.lines import Line, Role, as_fits, cell, clipped, flow, framed, wrapped
from oobleckd.protocol.nodeviews import LayerRange, NodeView
from oobleckd.protocol.watch import ImpactView
from oobleckd.words import CELLS, count, layers, noun, seconds, size

DEPENDS = ("impacts", "refused", "job", "nodes", "layers")
CANDIDATES, MANY_CANDIDATES = 3, 12
_FEW_NODES = 64
"""Up to so many nodes the daemon may be asked about more of them: it plans for each."""
_NAME = 12
_ROOMY = 84


def paint(view: View, now: float, width: int, height: int, nodes: Sequence[str] = ()) -> list[Line]:
    """Of ``nodes``: the verdict, its price, what is left, the plan that would follow, and the
    ways not taken.
    """
    if not nodes:
        hint: Line = (("mark nodes to see what follows when they die; the loss of one alone:", "dim"),)
        return framed([hint, *ranking(view, now, width, height - 1)], width, height)
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
            f"{stage.devices[0].rpartition('/')[0]} {layers(stage.start, stage.stop)}"
            for stage in pipeline.shown
        )
        lines.append(
            (
                (f" P{pipeline.index:<3} ", "strong"),
                (f"{count(len(pipeline.micro_batches), 'micro-batch')}  ", ""),
                (stages, "dim"),
            )
        )
    spare = height - len(lines) - len(impact.rejected)
    for other in impact.rejected:
        told = wrapped(f"✗ {other.what}, {seconds(other.cost_s)}: {other.why}", width - 1, 1 + max(0, spare))
        spare -= len(told) - 1
        lines += [((f" {text}", "dim"),) for text in told]
    return framed(lines, width, height)


def ranking(view: View, _now: float, width: int, height: int) -> list[Line]:
    """What the loss of each of those that matter most would cost, one alone."""
    asked = candidates(view, many=True)
    known = [impact for names in asked if (impact := view.impact(names)) is not None]
    if not known:
        said = "what follows is not kept of the past" if view.tape is not None else "not known yet"
        return [clipped(((said, "dim"),), width)][:height]
    names = (("node", -_NAME), *((name, wide) for name, wide, _ in _ranks(width)))
    head = " ".join(cell(name, abs(wide), right=wide > 0) for name, wide in names)
    lines: list[Line] = [((f" {head}  what follows", "dim"),)]
    return framed([*lines, *(_ranked(each, width) for each in known)], width, height)


def num_rows(view: View) -> int:
    """Of the ranking, with the columns' names."""
    return 1 + len(candidates(view, many=True))


def _ranks(width: int) -> list[tuple[str, int, Callable[[ImpactView], str]]]:
    """Columns of numbers that have room: name, cells, and what they say."""
    found: list[tuple[str, int, Callable[[ImpactView], str]]] = [
        ("stall", CELLS, lambda each: seconds(each.stall_s)),
        ("throughput", 10, throughput),
    ]
    if width >= _ROOMY:
        found += [
            ("copies", CELLS, lambda each: size(each.copied_bytes)),
            ("could lose then", 15, lambda each: "-" if each.stops else count(each.can_lose, "node")),
        ]
    return found


def _ranked(impact: ImpactView, width: int) -> Line:
    """A row: one compares nodes with each other."""
    numbers = " ".join(cell(say(impact), wide, right=True) for _, wide, say in _ranks(width))
    return (
        (f" {cell(', '.join(impact.nodes), _NAME)} ", "strong"), (numbers, ""), (" ", ""),
        *verdict(impact)[:1],
    )  # fmt: skip


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
    numbers: list[Line] = [
        (("stall ", "dim"), (seconds(impact.stall_s), "strong")),
        (("copies ", "dim"), (size(impact.copied_bytes), "strong"), (f" in {seconds(impact.copy_s)}", "")),
        (
            ("could still lose ", "dim"),
            (f"{impact.can_lose}", role),
            (f" {noun(impact.can_lose, 'node')}", "dim"),
        ),
    ]
    if impact.lost_layers and not impact.stops:  # else the verdict says it
        numbers.append((("throughput then ", "dim"), (throughput(impact), "strong")))
    return numbers


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
    """``a failure now would cost n013: 1.2 s, then 0.9% slower  n089: 12 steps`` for each of the sets
    ``asked`` for; empty while nothing is known.
    """
    fields: list[Line] = [
        ((f"{', '.join(nodes)}: ", "strong"), _cost(impact))
        for nodes in asked
        if (impact := view.impact(nodes)) is not None
    ]
    return as_fits(((("a failure now would cost", "dim"),), *fields), width, "  ") if fields else ()


def _cost(impact: ImpactView) -> tuple[str, Role]:
    if impact.stops:
        return ("the job stops", "bad")
    if impact.steps_back:
        return (f"{count(impact.steps_back, 'step')} (sole copy)", "bad")
    return (f"{seconds(impact.stall_s)}, then {1 - impact.throughput:.1%} slower", "")
