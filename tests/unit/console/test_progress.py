"""How far a job is, how fast, how long its steps take, and who was at what kind of work."""

from __future__ import annotations

import msgspec
import pytest

from oobleckd.console.model import View, fold
from oobleckd.console.widgets import jobfacts, optimes, steptimes, verdict
from oobleckd.draw.lines import length, plain
from oobleckd.protocol.jobviews import ProgressView, StepTimes
from tests.unit.console import build, watching
from tests.unit.console.build import NOW

TIMES = StepTimes(
    600, 0.5, 0.7, 0.9, 2.0, (0.4, 0.5, 0.6, 2.0), (10, 400, 180, 10), "node-3/0", 1.31
)  # fmt: skip
PROGRESS = ProgressView(
    elapsed_s=3_700.0, left_s=240.0, tokens=20_000_000, total_tokens=500_000_000, passes=1.5,
    tokens_per_s=192.0, flops_per_token=1e9, peak_flops=1e15, peak_of="h100-sxm, bf16", mfu=0.384,
    goodput=0.998, step_times=TIMES,
)  # fmt: skip


def of(**changes: object) -> View:
    progress = msgspec.structs.replace(PROGRESS, **changes)
    return fold(View(), (*watching.facts(), build.fetched(jobs=(build.job(progress=progress),))))


def said(lines: list[tuple[tuple[str, object], ...]]) -> str:
    return "\n".join(map(plain, lines))  # type: ignore[arg-type]


def test_the_headline_says_how_far_and_how_fast() -> None:
    head = said(verdict.paint(of(), NOW, 200))
    for part in ("step 20/500 4%", "ETA 4 min 0 s", "192.0 tokens/s", "MFU 38.4%", "goodput 99.8%",
                 "elapsed 1 h 1 min"):  # fmt: skip
        assert part in head
    small = said(verdict.paint(of(), NOW, 80))
    assert all(part in small for part in ("4%", "ETA", "can still lose", "tokens/s"))


def test_the_job_in_words_names_the_data_sheet_and_the_tokens() -> None:
    text = said(jobfacts.paint(of(), NOW, 200, 9))
    assert "MFU 38.4% of h100-sxm, bf16" in text
    assert "tokens 20 M of 500 M, 1.5 passes" in text
    assert "elapsed 1 h 1 min" in text
    assert "parameters" not in text


def test_the_job_in_words_says_how_many_parameters_a_token_goes_through() -> None:
    text = said(jobfacts.paint(of(params=46_702_792_704, active_params=12_879_925_248), NOW, 200, 9))
    assert "46.7 B parameters, 12.9 B active" in text
    dense = said(jobfacts.paint(of(params=124_439_808, active_params=124_439_808), NOW, 200, 9))
    assert "124 M parameters" in dense
    assert "active" not in dense


def test_what_is_not_known_is_not_told_and_the_rest_is_modelled_by_the_pace_of_steps() -> None:
    bare = fold(View(), watching.facts())
    text = said(jobfacts.paint(bare, NOW, 200, 9)) + said(verdict.paint(bare, NOW, 200))
    assert "MFU" not in text
    assert "tokens" not in text
    assert "ETA 4 min 0 s" in text, "480 steps of half a second"
    nothing = fold(bare, [build.fetched(jobs=(build.job(step_s=0.0),))])
    assert "ETA" not in said(verdict.paint(nothing, NOW, 200))
    over = fold(bare, [build.fetched(jobs=(build.job(state="done", step=500),))])
    assert "ETA" not in said(verdict.paint(over, NOW, 200))
    assert "100%" in said(verdict.paint(over, NOW, 200))


@pytest.mark.parametrize("width", [20, 44, 58, 90])
def test_step_times_by_quantile_and_in_a_histogram(width: int) -> None:
    lines = steptimes.paint(of(), NOW, width, 9)
    assert max(map(length, lines)) <= width
    text = said(lines)
    if width >= 58:
        for part in ("p50 500 ms", "p95 700 ms", "p99 900 ms", "max 2 s", "slowest node-3/0", "1.31 times"):
            assert part in text
        assert [line.split()[-1] for line in text.split("\n")[2:]] == ["10", "400", "180", "10"]
    assert steptimes.said(of()) == "the newest 600 steps"


def test_parts_that_have_no_line_share_one() -> None:
    text = said(steptimes.paint(of(), NOW, 90, 4)).split("\n")
    assert [line.split()[-1] for line in text[2:]] == ["410", "190"]
    assert "not known yet" in said(steptimes.paint(fold(View(), watching.facts()), NOW, 60, 4))


def test_who_was_at_what_for_how_long() -> None:
    head, *rows = map(plain, optimes.paint(watching.schedule(), [0, 1], 150))
    assert head.split()[:2] == ["device", "forward"]
    assert len(rows) == 4
    assert rows[0].split()[:6] == ["P0", "node-1", "300", "ms", "100", "ms"]
    assert "✗ lost" in rows[3]
    assert len({row.index("%") for row in rows}) == 1
