"""The cells of the goodput table, and which goals are missed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from benchmarks import goodput, goodput_page, keeping
from benchmarks.goodput import (
    BEST,
    PUBLISHED,
    SCHEDULES,
    SHAPES,
    Cell,
    Result,
    Row,
    cells,
    compared,
    job_of,
    missed,
    mtbf_of,
    questions_of,
    row_of,
    shown,
)
from benchmarks.keeping import Kept
from oobleckd.protocol.job import PolicyName
from oobleckd.simulator.outcome import Outcome, Question
from oobleckd.simulator.report import PolicyLine, lines_of
from oobleckd.simulator.runs import run_all
from oobleckd.simulator.traces import TraceEvent
from oobleckd.simulator.world import simulate
from tests.unit.simulator.build import question, trace_of


@pytest.fixture(scope="module")
def line() -> PolicyLine:
    return lines_of([simulate(question())], None)[0]


def result(line: PolicyLine, **samples: float) -> Result:
    lines = [
        msgspec.structs.replace(line, policy=name, samples=count, of_oracle=count / 100, of_ideal=count / 100)
        for name, count in samples.items()
    ]
    return Result(
        "6.7B",
        "every 10 min, none comes back",
        1.0,
        tuple(Row(BEST, each.policy, "fused", each) for each in lines),
        600.0,
    )


def test_the_oracle_is_asked_of_cells_that_lose_a_node_in_ten_minutes_or_less_often(line: PolicyLine) -> None:
    rare = result(line, adaptive=94, oobleck=93)
    often = msgspec.structs.replace(rare, mtbf_s=599.0)
    assert len(missed([rare])) == 1
    assert missed([often]) == []


def test_what_is_kept_is_not_simulated_again(
    tmp_path: Path, line: PolicyLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def simulated(wanted: Sequence[Cell], _jobs: int, _told: object = None) -> list[Result]:
        asked.extend(f"{cell.shape.name}, {cell.failures}" for cell in wanted)
        if len(asked) > 3:
            raise KeyboardInterrupt
        return [
            msgspec.structs.replace(result(line, adaptive=94), job=cell.shape.name, failures=cell.failures)
            for cell in wanted
        ]

    monkeypatch.setattr(goodput, "results_of", simulated)
    file = tmp_path / "kept.json"
    wanted = [
        cell for cell in cells(None, 2, 1.0) if "1 h, none" in cell.failures or "6 h, none" in cell.failures
    ]
    with pytest.raises(KeyboardInterrupt):
        goodput.kept_results(wanted, 1, Kept(file, Result))
    assert [name.partition(",")[0] for name in asked] == ["350M", "350M", "2.7B", "2.7B"]
    del asked[:]
    goodput.kept_results(wanted[:2], 1, Kept(file, Result))
    assert asked == []
    found = goodput.kept_results(wanted[:3], 1, Kept(file, Result))
    assert [(each.job, each.failures) for each in found] == [(c.shape.name, c.failures) for c in wanted[:3]]
    assert len(asked) == 1
    other = [cell for cell in cells(None, 3, 1.0) if cell.failures == wanted[0].failures][:1]
    goodput.kept_results(other, 1, Kept(file, Result))
    assert len(asked) == 2, "of other failures nothing is known"
    monkeypatch.setattr(keeping, "code_digest", lambda: b"other code")
    goodput.kept_results(wanted[:1], 1, Kept(file, Result))
    assert len(asked) == 3, "nor of what other code answers"


def test_a_file_that_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not ours", encoding="utf-8")
    assert goodput.main(["--only", "nothing", "--keep", str(file)]) == 2
    assert f"error: {file}: " in capsys.readouterr().err
    assert file.read_text(encoding="utf-8") == "not ours"


def test_between_two_losses_of_a_trace() -> None:
    losses = (
        TraceEvent(1.0, "fail", "node-1"),
        TraceEvent(1.0, "leave", "node-2"),
        TraceEvent(9.0, "join", "node-1"),
    )
    assert mtbf_of(trace_of(4, *losses, duration_s=90.0)) == 45.0
    assert mtbf_of(trace_of(4, duration_s=90.0)) == 90.0


def test_cells(tmp_path: Path) -> None:
    (tmp_path / "day.csv").write_text("0,join,a\n60,fail,a\n", encoding="utf-8")
    found = list(cells(tmp_path, 2, 1.0))
    assert len(found) == len(SHAPES) * 9
    assert {cell.failures for cell in found} >= {
        "every 10 min, back after 2 h",
        "every 6 h, none comes back",
        "day",
    }
    assert all(job_of(shape, SCHEDULES["decoupled"]).num_micro_batches == 128 for shape in SHAPES)
    best, published = (questions_of(found[0], setting) for setting in (BEST, PUBLISHED))
    assert {schedule for _, schedule in best} == set(SCHEDULES)
    assert all(
        each.costs.keeps == "nothing"
        for runs in published.values()
        for each in runs
        if each.policy == "oobleck"
    )
    for runs in best.values():
        assert [each.trace for each in runs] == list(found[0].traces)


def test_all_cells_are_asked_at_once_and_every_answer_is_its_question_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [cell for cell in cells(None, 2, 1.0) if "1 h" in cell.failures][:3]
    numbers = {id(trace): number for number, cell in enumerate(wanted, 1) for trace in cell.traces}
    ran = simulate(question())
    rounds = []

    def answered(questions: Sequence[Question], _jobs: int, _told: object) -> list[Outcome]:
        rounds.append(len(questions))
        return [
            msgspec.structs.replace(
                ran,
                policy=each.policy,
                costs=each.costs_name,
                seed=each.seed,
                samples=1000 * numbers[id(each.trace)]
                + each.seed
                + 100 * (each.job.schedule.backward == "fused"),
            )
            for each in questions
        ]

    monkeypatch.setattr(goodput, "run_all", answered)
    found = goodput.results_of(wanted, 1)
    assert len(rounds) == 1
    assert [(result.job, result.failures) for result in found] == [(c.shape.name, c.failures) for c in wanted]
    for number, each in enumerate(found, 1):
        best = {row.policy: row for row in each.rows if row.setting == BEST}
        assert set(best) == set(get_args(PolicyName))
        assert {row.schedule for row in best.values()} == {"fused"}
        assert {row.line.samples for row in best.values() if row.line} == {1000 * number + 100.5}
        assert {row.policy for row in each.rows if row.setting == PUBLISHED} < set(best)


def test_goals(line: PolicyLine) -> None:
    assert missed([result(line, adaptive=97, oobleck=96)]) == []
    assert missed([result(line, oobleck=10)]) == []
    [of_best, of_oracle, of_ideal, in_most] = missed([result(line, adaptive=80, oobleck=96, slipstream=90)])
    assert "83.33 % of oobleck" in of_best
    assert "80.00 % of the oracle" in of_oracle
    assert "80.00 % of the ideal" in of_ideal
    assert in_most == "adaptive is better than the best single policy in 0 of 1 cells"


def test_the_same_as_the_best_is_not_better(line: PolicyLine) -> None:
    better, same = result(line, adaptive=97, oobleck=96), result(line, adaptive=96, oobleck=96)
    assert missed([better, better, same]) == []
    assert missed([better, same]) == ["adaptive is better than the best single policy in 1 of 2 cells"]
    assert compared([better, same]) == (
        "adaptive against the best single policy: better in 1 of 2 cells, the same in 1, "
        "100.00 % to 101.04 % of it, 101.04 % in the median"
    )
    assert compared([result(line, oobleck=10)]) == ""


def test_a_policy_that_cannot_run_is_a_row_with_its_reason(line: PolicyLine) -> None:
    """Redundant layers take as much again, so bamboo needs twice as many nodes."""
    trace = trace_of(4)
    [ran] = run_all([question(trace=trace)], 1)
    [failed] = run_all([question("bamboo", trace)], 1)
    able, unable = row_of(BEST, "oobleck", "fused", [ran]), row_of(BEST, "bamboo", "fused", [failed])
    assert able.line is not None
    assert (able.problem, unable.line) == ("", None)
    assert "8 nodes, and 4 are here" in unable.problem
    found = Result("6.7B", "every 10 min", 1.0, (*result(line, adaptive=97, oobleck=96).rows, unable), 600.0)
    assert missed([found]) == []
    text = shown([found])
    assert f"6.7B: bamboo cannot run: {unable.problem}" in text
    [row] = [line.split() for line in text.splitlines() if " bamboo " in line and "cannot" not in line]
    assert row[-10:] == [BEST, "fused", *["-"] * 8]


def test_table(line: PolicyLine) -> None:
    text = shown([result(line, oobleck=50)])
    assert "6.7B, every 10 min, none comes back" in text
    assert "cannot run" not in text


def test_the_page_has_every_policy_as_a_share_of_adaptive(line: PolicyLine) -> None:
    ahead, behind = result(line, adaptive=97, oobleck=48.5), result(line, adaptive=96, oobleck=99)
    lost = msgspec.structs.replace(ahead, job="350M", failures="day")
    unable = Row(PUBLISHED, "bamboo", "fused", None, "it fits no number of nodes")
    found = [msgspec.structs.replace(each, rows=(*each.rows, unable)) for each in (lost, ahead, behind)]
    text = goodput_page.page(found)
    assert "`adaptive` against the best single policy: better in 2 of 3 cells, the same in 0" in text
    assert "It is behind in: 6.7B, every 10 min, none comes back (96.970 % of oobleck).\n" in text
    assert "Its goals are all met." not in text
    assert (
        "Goals that are missed: 6.7B, every 10 min, none comes back: adaptive has 96.97 % of oobleck." in text
    )
    small, large = text.partition("## 350M")[2].split("## 6.7B")
    rate = f"{line.samples_per_s:.2f}"
    assert f"| day | {rate} | 97.00 % | 97.00 % | 50.00 % | - |\n| *median* |  |  |  | 50.00 % | - |" in small
    assert f"| every 10 min, none comes back | {rate} | 96.00 % | 96.00 % | 103.12 % | - |" in large
    assert (
        "| *median* |  |  |  | 76.56 % | - |\n\nBamboo cannot run it: it fits no number of nodes.\n" in large
    )
    assert "| oobleck | bamboo, as published |\n| --- |" in large


def test_the_page_is_made_of_what_the_table_prints_as_json(
    tmp_path: Path, line: PolicyLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [result(line, adaptive=97, oobleck=96)]
    monkeypatch.setattr(goodput, "kept_results", lambda *_: found)
    assert goodput.main(["--only", "nothing", "-o", "json"]) == 0
    file = tmp_path / "results.json"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    assert goodput_page.main([str(file)]) == 0
    said = capsys.readouterr().out
    assert said == goodput_page.page(found)
    assert "Its goals are all met." in said
    assert goodput_page.main([str(tmp_path / "none.json")]) == 2
    assert "hint: name a file that goodput.py -o json printed" in capsys.readouterr().err
    assert goodput_page.main([]) == 2
