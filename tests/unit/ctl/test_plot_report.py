"""The verbs plot and report against prepared answers: what they write, where, and over what they do not."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from msgspec.structs import replace
from PIL import Image

from oobleckd.ctl import plot
from oobleckd.protocol.watch import CurveView
from tests.helpers.api_server import job_view
from tests.unit.ctl.conftest import Ctl
from tests.unit.report.material import CURVE, GOODPUT, INCIDENT, STORY


@pytest.fixture(autouse=True)
def _here(ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job with a curve; the current folder is empty."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    ctl.api.jobs = [job_view(step=10, steps=10, incidents=1)]
    ctl.api.incidents = [INCIDENT, replace(INCIDENT, id="inc-2", job="job-2")]
    ctl.api.evaluations["job-1"] = [*CURVE.evaluations]
    ctl.api.changes = [*STORY]
    ctl.api.watched = {"curve": CURVE, "goodput": GOODPUT}


def scale(ctl: Ctl) -> str:
    """Of the curve that was asked for last."""
    return next(query["scale"][0] for path, query in reversed(ctl.api.queries) if path.endswith("/curve"))


def test_a_plot_is_an_svg_with_units_and_marks(ctl: Ctl) -> None:
    result = ctl("plot", "small")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "job-1.svg\n", "")
    text = " ".join(ET.parse("job-1.svg").getroot().itertext())
    for part in (
        "Loss", "(nats per token)", "Learning rate", "Gradient norm", "(tokens/s)", "step",
        "job-1: 10 of 10 steps", "mean", "least to highest", "incident", "rollback to here", "evaluation",
    ):  # fmt: skip
        assert part in text, part
    assert scale(ctl) == "linear"


def test_a_plot_is_a_png_of_some_size(ctl: Ctl) -> None:
    ctl.api.watched["curve"] = replace(CURVE, log=True)
    result = ctl("plot", "small", "-o", "png", "--to", "run.PNG", "--scale", "log")
    assert (result.exit_code, result.stdout) == (0, "run.PNG\n")
    with Image.open("run.PNG") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 1000
    assert scale(ctl) == "log"


def test_a_plot_is_the_same_each_time_it_is_drawn() -> None:
    one, other = (plot.drawn(job_view(), CURVE, "svg") for _ in range(2))
    assert one == other


@pytest.mark.parametrize("verb", ["plot", "report"])
def test_a_file_of_ours_is_replaced_and_no_other(ctl: Ctl, verb: str) -> None:
    name = {"plot": "job-1.svg", "report": "job-1.html"}[verb]
    assert ctl(verb, "small").exit_code == 0
    assert ctl(verb, "small").exit_code == 0
    Path(name).write_text("mine")
    result = ctl(verb, "small")
    assert (result.exit_code, Path(name).read_text()) == (2, "mine")
    assert f"{name} is there, and not made by oobleckctl {verb}" in result.stderr
    assert "--to" in result.stderr


@pytest.mark.parametrize("verb", ["plot", "report"])
@pytest.mark.parametrize(
    ("file", "said"),
    [("nowhere/x.svg", "there is no folder nowhere"), ("folder.svg", "folder.svg is no file")],
)
def test_a_file_that_cannot_be_is_said(ctl: Ctl, verb: str, file: str, said: str) -> None:
    Path("folder.svg").mkdir()
    result = ctl(verb, "small", "--to", file)
    assert result.exit_code == 2
    assert said in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "run.jpg"), "ends in neither .svg nor .png"),
        (("--to", "run.svg", "-o", "png"), "run.svg is no png"),
        (("-o", "jpg"), "jpg"),
    ],
)
def test_a_picture_of_no_kind_that_is_known(ctl: Ctl, words: tuple[str, ...], said: str) -> None:
    result = ctl("plot", "small", *words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_without_matplotlib_plot_says_what_to_install(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda _name: None)
    result = ctl("plot", "small")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "pip install 'oobleckd[plot]'" in result.stderr


def test_without_a_step_there_is_no_plot_and_there_is_a_report(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(state="queued", step=0, loss=None)]
    ctl.api.watched = {"curve": CurveView("job-1", 0, ())}
    ctl.api.incidents, ctl.api.changes = [], []
    result = ctl("plot", "small")
    assert (result.exit_code, [*Path().iterdir()]) == (3, [])
    assert "job-1 has no step to draw" in result.stderr
    assert ctl("report", "small").exit_code == 0
    assert "No step has been committed yet." in Path("job-1.html").read_text()


def test_a_report_is_of_its_job_alone(ctl: Ctl) -> None:
    result = ctl("report", "small", "--scale", "log")
    assert (result.exit_code, result.stdout) == (0, "job-1.html\n")
    assert "job-1: 10 steps, 1 incident" in result.stderr
    text = Path("job-1.html").read_text()
    assert "inc-1" in text
    assert "inc-2" not in text
    assert "node-1 + node-2; node-3" in text
    assert "[train]\nsteps = 3" in text
    assert scale(ctl) == "log"


@pytest.mark.parametrize("verb", ["plot", "report"])
def test_no_such_job(ctl: Ctl, verb: str) -> None:
    assert ctl(verb, "nobody").exit_code == 3
    assert [*Path().iterdir()] == []


def test_programs_are_told_where_it_is(ctl: Ctl) -> None:
    assert ctl.json("report", "small", "--to", "r.html")["path"] == "r.html"
    document = json.loads(ctl("-o", "json", "plot", "small").stdout)
    assert (document["kind"], document["path"], document["step"]) == ("Plot", "job-1.svg", 10)
