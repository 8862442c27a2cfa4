"""A look at a job before it is submitted or planned: a worker's program is asked, and what follows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oobleckd.ctl import look, waiting
from oobleckd.ctl.output import Failure
from oobleckd.host.jobfile import load_job
from oobleckd.protocol.api import Problem
from oobleckd.protocol.modelnotes import FolderNote
from oobleckd.protocol.requests import Accepted
from tests.helpers.api_server import job_view
from tests.unit.ctl.conftest import Ctl

TOLD = (
    '{"notes":[{"kind":"unread","count":9,"names":["a","b"]}],'
    '"data":[{"count":1,"files":1,"name":"d.jsonl","what":"JSON"}]}'
)
JobFile = Callable[..., Path]


@pytest.fixture
def with_folder(job_file: JobFile, tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return job_file(f'[model]\ncheckpoint = "{tmp_path / "m"}"\n')


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_submit_says_what_is_to_be_said(
    ctl: Ctl, with_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    asked = []

    def run_worker(module: str, _option: str, file: str) -> str:
        asked.append((module, load_job(Path(file)).model.checkpoint))
        return TOLD

    monkeypatch.setattr(look, "run_worker", run_worker)
    ctl.api.jobs = [job_view(state="deploying")]
    result = ctl("submit", str(with_folder), *words)
    assert result.exit_code == 0
    assert asked == [("oobleckd.worker.tools.look", str(tmp_path / "m"))]
    assert f"{tmp_path}/m: 9 tensors of the folder are used by nothing: a, b and 7 more\n" in result.stderr
    assert "data.path: d.jsonl is JSON: it is trained on byte by byte\n" in result.stderr
    assert len(ctl.api.asked) == (not words)


def test_a_job_that_is_resumed_takes_nothing_of_the_folder(
    ctl: Ctl, with_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "run_worker", lambda *_: TOLD)
    assert "used by nothing" not in ctl("submit", str(with_folder), "--resume").stderr


@pytest.mark.parametrize(
    "words",
    [("submit",), ("submit", "--dry-run"), ("submit", "--resume"), ("plan", "--nodes=3"),
     ("simulate", "--nodes=3", "--mtbf=60", "--duration=60")],
)  # fmt: skip
def test_what_no_device_would_take_is_refused_before_a_node_is_asked(
    ctl: Ctl, job_file: JobFile, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    def run_worker(*_: str) -> str:
        raise Failure("model.family: 'gtp2' is not supported", "did you mean 'gpt2'?")

    monkeypatch.setattr(look, "run_worker", run_worker)
    verb, *options = words
    file = job_file()
    result = ctl(verb, str(file), *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"error: {file}: model.family: 'gtp2' is not supported\nhint: did you mean 'gpt2'?\n"
    )
    assert not ctl.api.asked


def test_text_that_lies_elsewhere_is_not_looked_at(
    ctl: Ctl, job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(look, "run_worker", lambda *words: asked.append(words) or "{}")
    result = ctl("plan", str(job_file('[data]\nsource = "text"\npath = "/on/nodes"\n')), "--nodes", "3")
    assert result.exit_code == 0
    assert asked[0][-1] == "--no-data"
    assert "/on/nodes" in result.stderr


def test_where_there_is_no_torch_the_nodes_look(
    ctl: Ctl, with_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look, "_NEEDED", ("no_such_library",))
    result = ctl("submit", str(with_folder), "--dry-run")
    assert result.exit_code == 0
    assert "there is no torch here" in result.stderr


def test_the_command_line_loads_no_torch() -> None:
    code = "import sys, oobleckd.ctl.jobs, oobleckd.ctl.plan, oobleckd.ctl.simulate, oobleckd.ctl.look\n"
    code += "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --------------------------------------------------------------------------- until it is planned


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("deploying", 0),
        ("running", 0),
        ("queued", 0),
        ("waiting", 0),
        ("done", 0),
        ("failed", 2),
        ("cancelled", 1),
    ],
)
def test_submit_ends_once_the_job_is_planned_or_cannot_be(
    ctl: Ctl, job_file: JobFile, state: str, code: int
) -> None:
    ctl.api.jobs = [job_view(state=state, reason="it fits no number of nodes (add some)")]
    result = ctl("submit", str(job_file()))
    assert (result.exit_code, result.stdout) == (code, "job-1\n")
    assert ("it fits no number of nodes" in result.stderr) == (state in {"failed", "cancelled", "waiting"})


def test_submit_waits_while_the_job_is_measured_and_planned(
    ctl: Ctl, job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["profiling", "planning", "failed"])

    def step(_seconds: float) -> None:
        ctl.api.jobs = [job_view(state=next(states), reason="too large")]

    monkeypatch.setattr(waiting.time, "sleep", step)
    ctl.api.jobs = [job_view(state="profiling")]
    assert ctl("submit", str(job_file())).exit_code == 2
    assert not list(states)


def test_submit_may_go_at_once(ctl: Ctl, job_file: JobFile) -> None:
    ctl.api.jobs = [job_view(state="failed", reason="too large")]
    assert ctl("submit", str(job_file()), "--no-wait").exit_code == 0


def test_a_daemon_that_goes_away_meanwhile_has_the_job(ctl: Ctl, job_file: JobFile) -> None:
    def accepted(_path: str, _body: object) -> Accepted:
        ctl.api.problem = Problem("ending", 503, "it is about to end", "")
        return Accepted("job-1", "job-1 starts now")

    ctl.api.on_act = accepted
    result = ctl("submit", str(job_file()))
    assert (result.exit_code, result.stdout) == (0, "job-1\n")
    assert "oobleckctl describe job job-1" in result.stderr


def test_describe_shows_the_notes(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(notes=(FolderNote("fresh", 1, ("lm_head.weight",)),))]
    shown = ctl("describe", "job", "small").stdout
    assert "1 tensor is not in the folder and begins fresh: lm_head.weight" in shown
    assert ctl.json("describe", "job", "small")["notes"][0]["kind"] == "fresh"


@pytest.mark.parametrize(("device", "said"), [("cpu", "math"), ("h100", "memory-efficient")])
def test_plan_says_what_computes_attention_where_it_is_asked(
    ctl: Ctl, job_file: JobFile, monkeypatch: pytest.MonkeyPatch, device: str, said: str
) -> None:
    told = (
        '{"attention":{"cpu":[{"blocks":8,"backend":"math","why":"dropout"}],'
        '"cuda":[{"blocks":8,"backend":"memory-efficient","why":"float32"}]}}'
    )
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        look, "run_worker", lambda *words: asked.append(words) or (told if "--attention" in words else "{}")
    )
    words = ("plan", str(job_file()), "--nodes", "3", "--device", device)
    shown = ctl(*words, "-v").stdout.partition("ATTENTION\n")[2]
    assert shown.splitlines()[1].split()[:2] == ["8", said]
    found = json.loads(ctl(*words, "-o", "json").stdout)["attention"]
    assert [(each["blocks"], each["backend"]) for each in found] == [(8, said)]
    assert "ATTENTION" not in ctl(*words).stdout
    assert ["--attention" in words for words in asked] == [True, True, False]
