"""Where the time of the devices went: useful, and what took the rest. Pure."""

from __future__ import annotations

from typing import get_args

from oobleckd.console.model import View
from oobleckd.draw.lines import Line, Role, Span, as_fits, bar, clipped, length
from oobleckd.protocol.watch import Lost
from oobleckd.words import seconds

DEPENDS = ("goodput", "refused", "job", "link")
CAUSES: tuple[Lost, ...] = get_args(Lost)
WORDS: dict[Lost, tuple[str, Role]] = {
    "detect": ("noticing a loss", "detect"), "plan": ("planning", "plan"),
    "reconfigure": ("new groups and layouts", "reconfigure"), "copy": ("copying layers", "copy"),
    "redone": ("work done again", "warn"), "skipped": ("steps without an update", "bad"),
    "degraded": ("running with fewer nodes", "note"),
    "waiting": ("waiting for nodes", "dim"), "bubble": ("bubbles of the schedule", "bar"),
}  # fmt: skip
_NAME = 26


def paint(view: View, _now: float, width: int, height: int) -> list[Line]:
    """A bar for what was useful and one for each cause that took time, all on the scale of the whole."""
    goodput = view.goodput
    if goodput is None:
        if view.tape is not None:
            return [clipped((("this is not kept of the past", "dim"),), width)][:height]
        problem = view.refusal("goodput")
        return [clipped(((f"not known{': ' if problem else ' yet'}{problem}", "dim"),), width)][:height]
    total_s = goodput.total_s or 1.0
    whole: Line = (
        (f"goodput {goodput.goodput:.1%}", "strong"),
        (f" of {seconds(goodput.total_s)} of device time", "dim"),
    )  # fmt: skip
    now_share: Span = (f"now {goodput.of_fault_free:.1%}", "strong")
    full: Line = (now_share, (" of the best throughput measured", "dim"))
    roomy = length(whole) + len("   ") + length(full) <= width
    head = as_fits((whole, full if roomy else (now_share, (" of the best", "dim"))), width)
    lines = [head, _row("useful", "good", goodput.useful_s, total_s, width)]
    if goodput.evaluated_s > 0:
        lines.append(_row("evaluations", "note", goodput.evaluated_s, total_s, width))
    known = [(cause, goodput.lost_s.get(cause, 0.0)) for cause in CAUSES]
    for cause, lost_s in sorted(known, key=lambda pair: -pair[1]):
        if lost_s > 0:
            words, role = WORDS[cause]
            lines.append(_row(words, role, lost_s, total_s, width))
    return lines[:height]


def _row(words: str, role: Role, part_s: float, total_s: float, width: int) -> Line:
    tail = f" {part_s / total_s:6.2%}  {seconds(part_s)}"
    room = max(4, width - _NAME - len(" 100.00%  59 min 59 s"))
    drawn = bar(0.0, min(1.0, part_s / total_s), room)
    return clipped(((f" {words:<{_NAME - 1}}", ""), (drawn, role), (tail, "dim")), width)
