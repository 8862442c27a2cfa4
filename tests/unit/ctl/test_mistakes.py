"""What is said of a mistake on the command line: by whom it was made, in words or as a document."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import yaml

from oobleckd.ctl import pages
from oobleckd.ctl.output import tolerance, when
from oobleckd.draw.times import clock, dated, minute
from tests.helpers.api_server import job_view
from tests.unit.ctl.conftest import Ctl

RAW = (
    "Invalid value",
    "is not a valid",
    "integer range",
    "No such option",
    "Got unexpected",
    "x>=",
    "Missing ",
)
"""What of click's own words would give it away."""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("up", "--nodes", "seven"), "--nodes is 'seven', and has to be a whole number from 1 to 256"),
        (("up", "--nodes", "0"), "--nodes is 0, and has to be a number from 1 to 256"),
        (("up", "--timeout", "soon"), "--timeout: 'soon'"),
        (("events", "--since", "x"), "--since is 'x', and has to be a whole number"),
        (
            ("describe", "schedule", "small", "--step", "0"),
            "--step is 0, and has to be a number of at least 1",
        ),
        (("get", "jbos"), "did you mean 'jobs'?"),
        (("get", "steps", "small", "big"), "too many words: big"),
        (("get", "jobs", "--foo"), "no option --foo"),
        (("submit", "x", "--rsume"), "no option --rsume; did you mean --resume?"),
        (("wait", "small"), "--for is missing"),
        (("wait",), "JOB is missing"),
        (("plan", "x", "--nodes"), "--nodes needs a value"),
        (("gt",), "did you mean 'get'?"),
        (("apply", "-f", "x"), "no verb 'apply'; did you mean 'submit'?"),
        (("squeue",), "no verb 'squeue'; did you mean 'get jobs'?"),
    ],
)
def test_what_was_typed_wrong_is_told_in_our_words(ctl: Ctl, words: tuple[str, ...], said: str) -> None:
    result = ctl(*words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not any(word in result.stderr for word in RAW), result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("describe", "job", ""), ("describe", "node", ""), ("get", "jobs", ""), ("cancel", ""), ("pause", ""),
        ("drain", ""), ("kill-node", ""), ("wait", "", "--for", "step=3"), ("story", ""), ("submit", ""),
        ("export", "", "x"), ("checkpoint", ""), ("verify", ""), ("start-node", ""),
        ("export-incident", "", "-o", "x"),
    ],
)  # fmt: skip
def test_an_empty_name_is_refused_before_anybody_is_asked(ctl: Ctl, words: tuple[str, ...]) -> None:
    ctl.api.jobs = [job_view()]
    result = ctl(*words)
    assert result.exit_code == 2
    assert "a word is empty" in result.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("describe", "job", "nobody"), 3),
        (("get", "nothing"), 2),
        (("wait", "small", "--for", "moon"), 2),
        (("submit", "/no/such/file"), 2),
    ],
)
def test_for_a_program_an_error_is_a_document(ctl: Ctl, words: tuple[str, ...], code: int) -> None:
    result = ctl("-o", "json", *words)
    assert (result.exit_code, result.stdout) == (code, "")
    told = json.loads(result.stderr.splitlines()[-1])
    assert (told["apiVersion"], told["kind"], told["code"]) == ("oobleck/v1", "Error", code)
    assert told["problem"]
    assert told["hint"]


@pytest.mark.parametrize(("words", "code"), [(("describe", "job", "nobody"), 3), (("get", "nothing"), 2)])
def test_errors_are_yaml_where_data_is(ctl: Ctl, words: tuple[str, ...], code: int) -> None:
    for line in (("-o", "yaml", *words), (*words, "-o", "yaml")):
        result = ctl(*line)
        assert (result.exit_code, result.stdout) == (code, "")
        told = yaml.safe_load(result.stderr)
        assert (told["apiVersion"], told["kind"], told["code"]) == ("oobleck/v1", "Error", code)
        assert told["problem"]
        assert told["hint"]


def test_a_page_that_a_hint_names_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # as one who has installed a wheel
    [named] = [word for word in pages.located("see docs/job-toml.md for it").split() if word.endswith(".md")]
    assert Path(named).is_file()
    assert pages.located("docs/no-such-page.md") == "docs/no-such-page.md"
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "job-toml.md").touch()
    assert pages.located("docs/job-toml.md") == "docs/job-toml.md", "it can be opened as it is"


@pytest.mark.parametrize(
    ("still", "f", "text"),
    [(-1, 2, "-"), (0, 2, "0 of 2"), (2, 2, "2 of 2"), (3, 1, "3 (f = 1)"), (3, 0, "3 (f = 0)")],
)
def test_nobody_can_lose_three_of_one(still: int, f: int, text: str) -> None:
    assert tolerance(still, f) == text


def test_a_time_of_another_day_bears_its_date() -> None:
    now = time.time()
    for days in (1, 3, 40, 400):
        at = now - days * 86_400.0
        date = time.strftime("%Y-%m-%d", time.localtime(at))
        assert when(at) == f"{date} {clock(at, 3)}"
        assert dated(at, now) == f"{date} {clock(at)}"
        assert minute(at, now) == f"{date} {clock(at)[:5]}"
    assert dated(now, now) == clock(now)


def test_every_list_and_story_shows_dates_and_ages(ctl: Ctl) -> None:
    ago = time.time() - 3 * 86_400.0
    date = time.strftime("%Y-%m-%d", time.localtime(ago))
    ctl.api.jobs = [job_view(submitted_at=ago, finished_at=ago + 60.0)]
    assert "3d" in ctl("get", "jobs").stdout.split()
    told = ctl("describe", "job", "small").stdout
    assert told.count(date) == 2
