"""Experts in a report: how evenly the tokens of the newest step went to them, and what their routers lost.

Owns what is in the picture's cells and in the table; how they look is ``svg``'s and the page's. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from markupsafe import Markup

from oobleckd.draw.experts import said
from oobleckd.protocol.jobviews import RouterView
from oobleckd.report.axes import exact
from oobleckd.report.svg import Cell, CellRow, cells_svg
from oobleckd.report.tables import ReportTable
from oobleckd.words import count, short

MOST_CELLS = 8192
"""Of a picture: of a model with more the layers that are loaded least evenly are drawn."""
_FULL = 2.0
"""Times the mean, from which on a cell has all of its colour, and another one: it is overloaded."""


class ExpertsSection(msgspec.Struct, frozen=True):
    """``told`` in a sentence or two, and in a ``picture`` (None: nobody has told of tokens yet)."""

    told: str
    picture: Markup | None
    table: ReportTable


def experts_section(routers: Sequence[RouterView]) -> ExpertsSection | None:
    """What there is to say of ``routers``; None of a model without any."""
    if not routers:
        return None
    told = f"Step {max(each.step for each in routers):,}: {said(routers)}.{_left_out(routers)}"
    return ExpertsSection(told, _picture(routers), _table(routers))


def _picture(routers: Sequence[RouterView]) -> Markup | None:
    """A row of cells a layer, one an expert, shaded by its tokens; None while nobody has told of them."""
    told = [each for each in routers if sum(each.tokens)]
    if not told:
        return None
    drawn = _drawn(told)
    sentence = (
        f"Tokens of each expert in {count(len(drawn), 'layer')}; the busiest has "
        f"{short(max(each.load for each in drawn))} times the mean of its layer. The numbers are below."
    )
    name = f"{count(max(len(each.tokens) for each in drawn), 'expert')}, from the first to the last"
    return cells_svg("experts", "Tokens by expert", sentence, [_row(each) for each in drawn], name)


def _left_out(routers: Sequence[RouterView]) -> str:
    """What is added where not all layers are drawn."""
    told = [each for each in routers if sum(each.tokens)]
    drawn = _drawn(told)
    if len(drawn) == len(told):
        return ""
    return f" Drawn are the {len(drawn):,} least even of {count(len(told), 'layer')}."


def _table(routers: Sequence[RouterView]) -> ReportTable:
    """Load, idle experts and losses of each layer."""
    return ReportTable(
        "Routers by layer; losses are before their coefficients",
        ("Layer", "Step", "Busiest expert (times the mean)", "Idle experts", "Aux loss", "z loss"),
        tuple(
            (
                f"{each.layer:,}", f"{each.step:,}", f"{each.load:.2f}", f"{each.idle:,}",
                _loss(each.aux_loss), _loss(each.z_loss),
            )
            for each in routers
        ),
        frozenset(range(6)),
    )  # fmt: skip


def _drawn(told: Sequence[RouterView]) -> list[RouterView]:
    """As many layers as a picture has room for, in their order."""
    most = max(1, MOST_CELLS // max((len(each.tokens) for each in told), default=1))
    uneven = sorted(told, key=lambda each: (-each.load, each.layer))[:most]
    return sorted(uneven, key=lambda each: each.layer)


def _row(router: RouterView) -> CellRow:
    mean = sum(router.tokens) / len(router.tokens)
    return CellRow(
        f"layer {router.layer}",
        tuple(_cell(router.layer, number, each, mean) for number, each in enumerate(router.tokens)),
        f"{router.load:.2f}",
    )


def _cell(layer: int, expert: int, tokens: int, mean: float) -> Cell:
    kind = "idle" if not tokens else "over" if tokens >= _FULL * mean else "usual"
    told = f"layer {layer}, expert {expert}: {count(tokens, 'token')}, {tokens / mean:.2f} of the mean"
    return Cell(kind, tokens / mean / _FULL, told)


def _loss(value: float | None) -> str:
    """0: the job does not ask for it."""
    if value is None:
        return "not finite"
    return exact(value) if value else "-"
