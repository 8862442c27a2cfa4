"""The templates in short: size, modelled time, how many run, and which share of the nodes that is. Pure."""

from __future__ import annotations

from oobleckd.console.model import View
from oobleckd.console.widgets.listing import missing
from oobleckd.draw.lines import Line, Role, bar, clipped, more
from oobleckd.protocol.jobviews import TemplateView
from oobleckd.words import seconds

DEPENDS = ("templates", "refused")
_HEAD = "  nodes stages micro-batch in use  share"
_TEXT = len(_HEAD) - len("share")


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """A line for each template; where not all have room, those in use stay."""
    if not view.templates:
        return [missing(view, "templates", "none made yet")]
    total = sum(template.num_nodes * template.instances for template in view.templates)
    used_first = sorted(view.templates, key=lambda each: (not each.instances, each.num_nodes))
    room = height - 1 if len(used_first) < height else height - 2
    kept = sorted(used_first[: max(1, room)], key=lambda each: each.num_nodes)
    lines = [clipped(((_HEAD, "dim"),), width), *(_row(each, total, width) for each in kept)]
    if len(kept) < len(used_first):
        lines.append(more("template", len(used_first) - len(kept)))
    return lines[:height]


def _row(template: TemplateView, total: int, width: int) -> Line:
    used: Role = "" if template.instances else "dim"
    text = (
        f"{template.num_nodes:>5} {len(template.stages):>6} {seconds(template.period_s):>11} "
        f"{template.instances:>6}  "
    )
    share = template.num_nodes * template.instances / total if total else 0.0
    room = width - _TEXT - len(" 100 %")
    drawn = bar(0.0, share, room) if share and room > 3 else ""
    percent = f" {share:.0%}" if share else ""
    sign = "▸ " if template.instances else "  "
    return clipped(((sign, "good"), (text, used), (drawn, "bar"), (percent, "dim")), width)
