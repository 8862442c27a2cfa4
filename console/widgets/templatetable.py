"""The templates in rows with a cursor, as modelled and as measured, and the stages of the chosen one with
layers and memory. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import mean

import msgspec

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import clamped, matches, missing, nothing, rows
from oobleckd.draw.lines import Line, bar, clipped
from oobleckd.protocol.jobviews import TemplateView
from oobleckd.protocol.watch import LaneView
from oobleckd.words import CELLS, count, layers, seconds, size

DEPENDS = ("templates", "pipelines", "schedule", "refused")
_HEAD = f"  nodes  in use  stages  {'memory':>9}  {'modelled':>{CELLS}}  {'measured':>{CELLS}}"
_ROOMY = 90
_HEADED = 2  # above the stages of a template: an empty row and its name
_AGAIN = {"none": "", "selective": "selective again", "blocks": "blocks again"}
_AGAIN_WIDTH = max(map(len, _AGAIN.values())) + 2
_MORE = f"  {'first':>{CELLS}}  {'further':>{CELLS}}  split"


class TemplateTableLook(msgspec.Struct, frozen=True):
    """Which rows, in which order, and where the cursor is."""

    words: str = ""
    cursor: int = 0
    used_first: bool = False


def paint(
    view: View, _now: float, width: int, height: int, look: TemplateTableLook | None = None
) -> list[Line]:
    """The rows in sight; below them the chosen template, where there is room."""
    look = look or TemplateTableLook()
    found = selected(view, look)
    if not found:
        none = (
            f'no template has "{look.words}"' if look.words else "none: they are made when a job is planned"
        )
        return nothing(missing(view, "templates", none), height)
    chosen = found[clamped(look.cursor, len(found))]
    below = _stages(chosen, width)
    for other in found:
        more = _stages(other, width) if other is not chosen else []
        if len(below) + len(more) + 1 + len(found) <= height:
            below += more
    if height < len(below) + 1 + min(3, len(found)):
        below = []
    head: Line = clipped(((_HEAD + (_MORE if width >= _ROOMY else ""), "dim"),), width)
    shares, took = _shares(view), _measured(view)
    body = rows(
        found, look.cursor, width, height - 1 - len(below),
        lambda each: _row(each, shares.get(len(each.stages)), took.get(len(each.stages)), width),
    )  # fmt: skip
    return [head, *body, *below][:height]


def num_rows(view: View) -> int:
    """Of all templates, with the stages of each."""
    return 1 + sum(1 + _HEADED + len(template.stages) for template in view.templates)


def selected(view: View, look: TemplateTableLook) -> list[TemplateView]:
    """The rows, in order."""
    found = [each for each in view.templates if matches(_words(each), look.words)]
    return sorted(found, key=lambda each: (look.used_first and not each.instances, each.num_nodes))


def _words(template: TemplateView) -> str:
    return f"{count(template.num_nodes, 'node')} {'in use' if template.instances else 'unused'}"


def _shares(view: View) -> dict[int, float]:
    """Number of stages -> micro-batches in a step of such a pipeline, the mean of those there are."""
    found: dict[int, list[int]] = {}
    for pipeline in view.pipelines:
        found.setdefault(len(pipeline.shown), []).append(len(pipeline.micro_batches))
    return {stages: mean(numbers) for stages, numbers in found.items()}


def _measured(view: View) -> dict[int, float]:
    """Number of stages -> how long such a pipeline worked at the step in sight, the mean of those
    there are.
    """
    if view.schedule is None:
        return {}
    pipelines: dict[int, list[LaneView]] = {}
    for lane in view.schedule.lanes:
        pipelines.setdefault(lane.pipeline, []).append(lane)
    found: dict[int, list[float]] = {}
    for lanes in pipelines.values():
        if not any(lane.dead for lane in lanes):
            found.setdefault(len(lanes), []).append(_last_s(lanes))
    return {stages: mean(times) for stages, times in found.items()}


def _last_s(lanes: Iterable[LaneView]) -> float:
    return max((op.stop_s for lane in lanes for op in lane.ops), default=0.0)


def _row(template: TemplateView, share: float | None, took_s: float | None, width: int) -> Line:
    """``modelled``: a step with the share that such pipelines have now, without the exchange of sums."""
    modelled = "-" if share is None else seconds(template.fill_s + (share - 1) * template.period_s)
    text = (
        f"{template.num_nodes:>5}  {template.instances:>6}  {len(template.stages):>6}  "
        f"{size(max(template.memory_bytes, default=0)):>9}  {modelled:>{CELLS}}  "
        f"{'-' if took_s is None else seconds(took_s):>{CELLS}}"
    )
    if width >= _ROOMY:
        split = "│".join(layers(*stage) for stage in template.stages)
        text += f"  {seconds(template.fill_s):>{CELLS}}  {seconds(template.period_s):>{CELLS}}  {split}"
    return (("▸ " if template.instances else "  ", "good"), (text, "" if template.instances else "dim"))


def _stages(template: TemplateView, width: int) -> list[Line]:
    """A bar for each stage: its layers on the axis of all."""
    last = max((stop for _, stop in template.stages), default=1)
    room = max(8, width - 42 - (_AGAIN_WIDTH if template.recompute else 0))
    head = f"template of {count(template.num_nodes, 'node')}"
    lines: list[Line] = [(), ((head, "strong"),)]
    for index, (start, stop) in enumerate(template.stages):
        memory = template.memory_bytes[index] if index < len(template.memory_bytes) else 0
        text = f" s{index:<3} layers {layers(start, stop):<8} {size(memory) if memory else '':>{CELLS}}  "
        if template.recompute:
            text += f"{_AGAIN[template.recompute[index]]:<{_AGAIN_WIDTH}}"
        lines.append(clipped(((text, ""), (bar(start / last, stop / last, room), "bar")), width))
    return lines
