"""The page of the papers' ratios: made of claims and results, and up to date."""

from __future__ import annotations

from math import inf
from pathlib import Path

import msgspec
import pytest

from benchmarks.goodput import SHAPES
from benchmarks.papers import POLICIES, Claim, Dialled, Ran, Results, Setting, page, questions, ratio_of, read
from oobleckd.simulator.failures import memoryless
from oobleckd.simulator.prices import Price
from tests.unit.test_imports import ROOT

UP_TO = Claim("oobleck", "varuna", "throughput", 20.0, up_to=True, source="Somebody")
CHEAPER = Claim("bamboo", "on-demand", "cost", 2.4, up_to=False, source="Somebody")


def setting(costs: str = "ours", often: str = "1 h", **samples: int) -> Setting:
    ran = {policy: Ran(count, 8.0) for policy, count in samples.items()}
    unable = {policy: "no room" for policy in POLICIES if policy not in ran}
    return Setting("350M", costs, f"a loss every {often}", 1800.0, Ran(100, 16.0), ran, unable)


def test_ratios() -> None:
    price = Price(2.0, 1.0, "by hand")
    assert ratio_of(UP_TO, setting(oobleck=60, varuna=20), price) == 3.0
    assert ratio_of(UP_TO, setting(oobleck=60, varuna=0), price) == inf
    assert ratio_of(UP_TO, setting(oobleck=60), price) is None
    assert ratio_of(CHEAPER, setting(bamboo=50), price) == pytest.approx((2.0 * 16 / 100) / (1.0 * 8 / 50))
    assert ratio_of(CHEAPER, setting(bamboo=0), price) == 0.0


def test_it_says_where_a_ratio_comes_out_and_where_not() -> None:
    settings = (
        setting("as-published", oobleck=60, varuna=3),
        setting(oobleck=60, varuna=50),
        setting(often="3 h", oobleck=60),
    )
    text = page([UP_TO], Results(Price(2.0, 1.0, "by hand"), settings))
    assert "## Oobleck: up to 20 times the samples of varuna" in text
    assert (
        "A setting reaches it: 20 with 350M, as published, a loss every 1 h. The lowest is 1.2, with 350M, "
        "our costs" in text
    )
    assert "| 350M, our costs, a loss every 3 h | one of the two cannot run |" in text
    text = page([UP_TO], Results(Price(2.0, 1.0, "by hand"), settings[1:2]))
    assert "No setting reaches it: the highest ratio is 1.2," in text
    assert "No setting can run both." in page([UP_TO], Results(Price(2.0, 1.0, "by hand"), settings[2:]))


def test_it_says_what_a_dial_must_be_for_a_ratio_to_come_out() -> None:
    dials = (
        Dialled(0, "a loss every 90 s", 60.0, 255.0, 33.2),
        Dialled(0, "a loss every 1 h", 60.0, 15360.0, 5.5),
        Dialled(1, "a loss every 1 h", 1.0, 2.0, 3.0),
    )
    claim = msgspec.structs.replace(UP_TO, dial="restart_s")
    text = page([claim], Results(Price(2.0, 1.0, "by hand"), (setting(oobleck=60, varuna=50),), dials))
    assert "The ratio depends on `restart_s` of varuna, which we assume to be 60 s." in text
    assert "| a loss every 90 s | 255 s | 33.2 |" in text
    assert "| a loss every 1 h | 15360 s | 5.5, the most that was tried |" in text


def test_policies_of_a_setting_meet_the_same_failures() -> None:
    trace = memoryless(32, 90.0, 600.0, 600.0, 0)
    *asked, quiet = questions(SHAPES[0], "as-published", trace)
    assert [each.policy for each in asked] == list(POLICIES)
    assert all(each.trace == trace for each in asked)
    assert (quiet.trace.events, quiet.trace.duration_s) == ((), 600.0)


def test_the_page_is_of_the_results_that_are_here() -> None:
    claims, results = read()
    assert page(claims, results) == Path(ROOT, "docs", "papers.md").read_text(encoding="utf-8")
    assert msgspec.json.decode(msgspec.json.encode(results), type=Results) == results
