"""The page of stages of several devices: made of results that are kept, which are what is planned today."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from benchmarks.sharded import CASES, page, read, row
from tests.unit.test_imports import ROOT


def test_the_page_is_of_the_results_that_are_here() -> None:
    written = Path(ROOT, "docs", "sharded-stages.md").read_text(encoding="utf-8")
    assert page(read(), written) == written


def test_the_results_are_of_this_planner() -> None:
    """The smallest case, with the number that is chosen: the others take half a minute."""
    kept = read()[0]
    found = row(CASES[0], kept.devices_per_stage)
    assert replace(found, options=kept.options) == kept
    chosen = next(each for each in kept.options if each.devices_per_stage == kept.devices_per_stage)
    assert (chosen.step_s, chosen.memory_bytes) == (
        kept.step_s,
        sum(getattr(kept.held, f) for f in kept.held.__struct_fields__),
    )


def test_what_the_issue_asked_for_fits() -> None:
    by_case = {(each.title, each.num_nodes): each for each in read()}
    assert by_case["Llama-2 7B", 1].step_s
    assert by_case["Llama-2 70B", 4].step_s
    largest = [each for each in read() if each.title == "Llama-3.1 405B"]
    assert [option.n0 for option in largest[0].options][:2] == [0, 0]  # a layer is larger than a device
    assert all(each.held.state < 80e9 for each in read())
