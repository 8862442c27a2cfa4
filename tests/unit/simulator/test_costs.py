"""Names and files of costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleckd.simulator.costs import BAMBOO, OURS, VARUNA, CostsError, costs_named
from oobleckd.simulator.prices import instances, price_of


def test_names() -> None:
    assert costs_named("ours", "oobleck") == OURS
    assert costs_named("as-published", "varuna") == VARUNA == costs_named("varuna-as-published", "oobleck")
    assert costs_named("as-published", "bamboo") == BAMBOO
    assert costs_named("as-published", "adaptive") == OURS
    assert costs_named("silent", "oobleck").detect_s == OURS.silence_s


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "costs.toml"
    path.write_text('like = "varuna-as-published"\ndetect_s = 7\n', encoding="utf-8")
    found = costs_named(str(path), "oobleck")
    assert (found.detect_s, found.restart_s) == (7.0, VARUNA.restart_s)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("detect_s = -1\n", "detect_s"),
        ("deteckt_s = 1\n", "deteckt_s"),
        ('like = "nobody"\n', "no costs 'nobody'"),
        ("detect_s =\n", "is no TOML"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CostsError, match=problem) as caught:
        costs_named(str(path), "oobleck")
    assert str(path) in caught.value.problem


def test_no_such_costs() -> None:
    with pytest.raises(CostsError) as caught:
        costs_named("free", "oobleck")
    assert "as-published" in caught.value.hint
    with pytest.raises(CostsError, match="No such file"):
        costs_named("none.toml", "oobleck")


def test_prices() -> None:
    table = instances()
    assert all(0 < each.spot < each.on_demand for each in table.values())
    found = price_of("", "a100", 2)
    assert found is not None
    assert found.on_demand == pytest.approx(table["p4de.24xlarge"].on_demand / 4)
    assert price_of("", "unheard of", 1) is None
    with pytest.raises(KeyError):
        price_of("unheard of", "a100", 1)
