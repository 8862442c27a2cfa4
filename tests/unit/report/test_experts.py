"""Experts in a report: what is drawn of how many tokens, and what is left out."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from msgspec.structs import replace

from oobleckd.protocol.jobviews import RouterView
from oobleckd.report.experts import MOST_CELLS, ExpertsSection, experts_section
from oobleckd.report.page import page
from tests.unit.report.material import ROUTERS, material
from tests.unit.report.test_page import Outline, said


def section(*routers: RouterView) -> ExpertsSection:
    found = experts_section(routers)
    assert found is not None
    return found


def cells(found: ExpertsSection) -> list[tuple[str | None, str | None, str]]:
    """Class, share of the colour and words of each cell."""
    picture = ET.fromstring(found.picture or "")
    return [
        (each.get("class"), each.get("fill-opacity"), "".join(each.itertext()))
        for each in picture.iter("rect")
    ]


def test_a_cell_has_as_much_colour_as_its_expert_has_of_twice_the_mean() -> None:
    assert cells(section(*ROUTERS)) == [
        ("cell usual", "0.75", "layer 1, expert 0: 12 tokens, 1.50 of the mean"),
        ("cell usual", "0.25", "layer 1, expert 1: 4 tokens, 0.50 of the mean"),
        ("cell usual", "0.5", "layer 1, expert 2: 8 tokens, 1.00 of the mean"),
        ("cell usual", "0.5", "layer 1, expert 3: 8 tokens, 1.00 of the mean"),
        ("cell over", "1", "layer 3, expert 0: 20 tokens, 2.50 of the mean"),
        ("cell idle", "0", "layer 3, expert 1: 0 tokens, 0.00 of the mean"),
        ("cell usual", "0.38", "layer 3, expert 2: 6 tokens, 0.75 of the mean"),
        ("cell usual", "0.38", "layer 3, expert 3: 6 tokens, 0.75 of the mean"),
    ]


def test_the_page_of_a_mixture_of_experts_has_a_part_for_them() -> None:
    text = said(page(material(routers=ROUTERS)))
    for part in (
        "Step 10: load 2.5 at most (layer 3), 1 idle, aux loss not finite.",
        "1 10 1.50 0 1.0625 -",
        "3 10 2.50 1 not finite -",
        "4 experts, from the first to the last",
    ):
        assert part in text, part
    assert {"href": "#experts"} in Outline(page(material(routers=ROUTERS))).all("a")


def test_no_other_model_has_one() -> None:
    text = page(material())
    assert "#experts" not in text
    assert "Experts" not in said(text)


def test_while_nobody_has_told_of_tokens_there_is_a_table_alone() -> None:
    untold = tuple(replace(each, tokens=()) for each in ROUTERS)
    text = said(page(material(routers=untold)))
    assert "No device has told of the tokens of its experts" in text
    assert "1 10 1.50 0 1.0625 -" in text


def test_of_a_model_with_too_many_the_least_even_layers_are_drawn_in_their_order() -> None:
    experts = MOST_CELLS // 2
    many = tuple(
        RouterView(layer, 7, 1.0, 1.0, load, 0, (1,) * experts)
        for layer, load in enumerate((3.0, 1.0, 2.0), start=4)
    )
    found = section(*many)
    assert "Drawn are the 2 least even of 3 layers." in found.told
    assert re.findall(r">(layer \d+)</text>", found.picture or "") == ["layer 4", "layer 6"]
    assert len(found.table.rows) == 3
