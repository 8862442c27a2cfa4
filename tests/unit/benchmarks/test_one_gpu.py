"""What one_gpu.py makes of what it measured, and how it asks programs to train."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from benchmarks.asked import AskedProgram
from benchmarks.one_gpu import (
    COMPILED,
    DETERMINISTIC,
    MODELS,
    OURS,
    OURS_COMPILED,
    PLAIN,
    Measured,
    meets_its_goals,
    mfu_of,
    page_of,
    ratios_of,
)
from benchmarks.peers.launch import PeerFailed

TIMEOUT_S = 60.0
TRAINS = """
import sys
print("libraries print", flush=True)
from benchmarks.peers.serving import serve
done = []
def loop_of(name):
    print("at any time")
    if name == "fails":
        raise ValueError("Error: no such loop")
    return lambda: done.append(name)
serve(loop_of, "cpu", device="cpu", args=sys.argv[1:])
"""


def measured(**rates: list[float]) -> Measured:
    found = Measured(MODELS["cuda"]["gpt2"])
    found.about = {"device": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "flops_per_token": 989e12 / 1e6}
    found.rates = rates
    found.peak_bytes = dict.fromkeys(rates, 3 * 2**30)
    found.rows = {OURS: [{"name": "gemm<a|b>", "ms": 12.345, "share": 0.5, "count": 8}]}
    return found


ALL = {
    PLAIN: [200.0, 400.0], OURS: [100.0, 300.0], DETERMINISTIC: [100.0, 300.0], COMPILED: [500.0, 300.0],
    OURS_COMPILED: [450.0, 270.0],
}  # fmt: skip


def test_ratios_are_formed_within_a_round_where_loops_took_turns() -> None:
    told = ratios_of(measured(**ALL))
    assert told["oobleckd / torch"]["median"] == 0.625
    assert told["oobleckd / torch, deterministic"]["median"] == 1.0
    compiled = told["oobleckd, compiled / torch, deterministic, compiled"]
    assert (compiled["median"], compiled["least"], compiled["in_turns"]) == (0.9, 0.95, True)
    apart = told["oobleckd / torch, deterministic, compiled"]
    assert (apart["median"], apart["in_turns"]) == (0.5, False)
    assert not meets_its_goals(measured(**ALL))
    assert meets_its_goals(measured(**{OURS: [99.0], DETERMINISTIC: [100.0]}))


def test_mfu_is_of_the_card_s_data_sheet_and_the_median() -> None:
    assert mfu_of(measured(**ALL), OURS) == pytest.approx(200 / 1e6)
    unknown = measured(**ALL)
    unknown.about["device"] = "cpu"
    assert mfu_of(unknown, OURS) is None


def test_the_page_has_figures_ratios_and_the_profile() -> None:
    page = page_of([measured(**ALL)], "cuda", dt.datetime(2026, 12, 1, tzinfo=dt.UTC))
    assert "on 2026-12-01: NVIDIA H100 80GB HBM3, torch 2.13.0." in page
    assert "| oobleckd | 200 | 0.0% | 3.00 |" in page
    assert "| oobleckd / torch | 0.625 | 0.500-0.750 | in turns |  |  |" in page
    assert r"| `gemm<a\|b>` | 12.35 | 50.0% | 8 |" in page
    assert "rehearsal" not in page
    assert "rehearsal" in page_of([measured(**ALL)], "cpu", dt.datetime(2026, 12, 1, tzinfo=dt.UTC))


def test_a_program_trains_as_much_as_it_is_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = write_module(tmp_path, monkeypatch)
    with AskedProgram(tmp_path, module, "--some", "x", timeout_s=TIMEOUT_S) as program:
        assert program.about["args"] == ["--some", "x"]
        answer = program.ask("plain", steps=3, warm_up=1)
        assert answer["seconds"] >= 0
        assert answer["peak_bytes"] > 2**20
        assert program.ask("plain", profile=True)["rows"] == []
        with pytest.raises(PeerFailed, match="no such loop"):
            program.ask("fails")


def write_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program that trains nothing; its name as a module."""
    (folder / "trains.py").write_text(TRAINS)
    monkeypatch.setattr("benchmarks.asked.ROOT", folder)
    (folder / "benchmarks").symlink_to(Path(__file__).resolve().parents[3] / "benchmarks")
    return "trains"
