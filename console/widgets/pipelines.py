"""The pipelines of the plan in force: stages with their layers and devices, shares of the micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import missing
from oobleckd.draw.lines import Line, Span, bar, clipped, more
from oobleckd.protocol.jobviews import PipelineView, ShownStage
from oobleckd.words import count, layers

DEPENDS = ("pipelines", "nodes", "refused")
_ROOMY = 76
_GONE = frozenset({"lost", "left"})


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """A line for each stage where all have room, else one for each pipeline."""
    if not view.pipelines:
        return [missing(view, "pipelines", "no plan is deployed")]
    gone = {node.name for node in view.nodes if node.state in _GONE}
    total = sum(len(pipeline.micro_batches) for pipeline in view.pipelines)
    if num_rows(view) <= height:
        num_layers = _num_layers(view.pipelines)
        full = [_full(pipeline, total, num_layers, gone, width) for pipeline in view.pipelines]
        return [line for lines in full for line in lines]
    if len(view.pipelines) <= height:
        return [_short(pipeline, total, gone, width) for pipeline in view.pipelines]
    # Those that lost a stage first: they are what one looks for.
    kept = sorted(view.pipelines, key=lambda pipeline: not _hurt(pipeline, gone))[: max(0, height - 1)]
    rows = [_short(pipeline, total, gone, width) for pipeline in kept]
    return [*rows, more("pipeline", len(view.pipelines) - len(kept))]


def num_rows(view: View) -> int:
    """With a line for each stage."""
    return sum(1 + len(pipeline.shown) for pipeline in view.pipelines)


def node_of(device: str) -> str:
    """The node of device ``"<node>/<index>"``."""
    return device.rpartition("/")[0]


def _hurt(pipeline: PipelineView, gone: set[str]) -> bool:
    return bool(pipeline.vacant) or any(node in gone for node in pipeline.nodes)


def _num_layers(pipelines: Sequence[PipelineView]) -> int:
    return max((stage.stop for pipeline in pipelines for stage in pipeline.stages), default=1)


def _full(pipeline: PipelineView, total: int, num_layers: int, gone: set[str], width: int) -> list[Line]:
    shown = pipeline.shown
    head: Line = (
        (f"P{pipeline.index}", "strong"),
        (f"  {count(len(pipeline.nodes), 'node')}, {count(len(shown), 'stage')}   ", "dim"),
        (f"{len(pipeline.micro_batches)} of {count(total, 'micro-batch')}", ""),
        (f"   {_numbers(pipeline.micro_batches)}", "dim"),
    )
    name = max((len(stage.name) for stage in shown), default=0)
    stages = [
        _stage(index, stage, name, num_layers, _absence(stage, gone), width)
        for index, stage in enumerate(shown)
    ]
    return [clipped(line, width) for line in (head, *stages)]


def _absence(stage: ShownStage, gone: set[str]) -> str:
    """In a word, why nobody computes at a stage; "" where somebody does."""
    return stage.absence or ("lost" if node_of(stage.devices[0]) in gone else "")


def _stage(index: int, stage: ShownStage, name: int, num_layers: int, absence: str, width: int) -> Line:
    text = f" s{index:<2} {stage.name:<{name}}  layers {layers(stage.start, stage.stop):<7} "
    room = max(4, width - len(text) - max(len(" ✗ vacant"), len(f" ✗ {absence}")))
    drawn = bar(stage.start / num_layers, stage.stop / num_layers, room)
    if absence:
        return (
            (text, "bad"),
            ("".join(" " if cell == " " else "x" for cell in drawn), "bad"),
            (f" ✗ {absence}", "bad"),
        )
    return ((text, ""), (drawn, "bar"))


def _numbers(micro_batches: Sequence[int]) -> str:
    """``"0-3, 6"``."""
    runs: list[list[int]] = []
    for number in sorted(micro_batches):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(layers(run[0], run[-1] + 1) for run in runs)


def _share(number: int, total: int, width: int) -> str:
    """How many micro-batches of how many; in little room the column's meaning is the screen's."""
    return f"{number:>{len(str(total))}}/{total} {'micro-batches' if width >= _ROOMY else 'mb'} "


def _short(pipeline: PipelineView, total: int, gone: set[str], width: int) -> Line:
    spans: list[Span] = [
        (f"P{pipeline.index:<3} ", "strong"),
        (_share(len(pipeline.micro_batches), total, width), ""),
    ]
    for stage in pipeline.shown:
        node = node_of(stage.devices[0])
        held = layers(stage.start, stage.stop)
        absent = bool(_absence(stage, gone))
        spans.append((f" ✗{node} {held}", "bad") if absent else (f" {node} {held}", "dim"))
        spans.append((" │", "dim"))
    return clipped(tuple(spans[:-1]), width)
