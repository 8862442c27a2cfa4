"""The templates made for the job, the ones in use marked; where not all have room, the used ones stay."""

from __future__ import annotations

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import missing
from oobleckd.draw.lines import Line, Role, clipped, more
from oobleckd.protocol.jobviews import TemplateView
from oobleckd.words import layers, seconds

DEPENDS = ("templates", "refused")


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """A line for each template, smallest first."""
    if not view.templates:
        return [missing(view, "templates", "none made yet")]
    head: Line = clipped((("  nodes  used  micro-batch  layers of each stage", "dim"),), width)
    rows = list(view.templates)
    if len(rows) < height:
        return [head, *(_row(template, width) for template in rows)]
    used_first = sorted(rows, key=lambda template: (not template.instances, template.num_nodes))
    kept = sorted(used_first[: max(1, height - 2)], key=lambda template: template.num_nodes)
    lines = [head, *(_row(template, width) for template in kept), more("template", len(rows) - len(kept))]
    return lines[:height]


def _row(template: TemplateView, width: int) -> Line:
    role: Role = "" if template.instances else "dim"
    parts = [layers(*stage) for stage in template.stages]
    if template.chunks > 1:  # those of a device together
        parts = [f"{one}, {other}" for one, other in zip(parts[: len(parts) // 2], parts[::-1], strict=False)]
    split = "│".join(parts)
    text = f"{template.num_nodes:>5}  {template.instances:>4}  {seconds(template.period_s):>11}  {split}"
    return clipped((("▸ " if template.instances else "  ", "good"), (text, role)), width)
