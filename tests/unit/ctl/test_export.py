"""The verb ``export``: which checkpoint it takes, what it refuses, and what it makes of the
worker's words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from oobleckd.ctl import export, programs
from oobleckd.ctl.output import Failure
from oobleckd.host.export import Exported
from oobleckd.protocol.api import Problem
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.requests import Accepted
from tests.helpers.api_server import job_spec, job_view
from tests.unit.ctl.conftest import Ctl


@pytest.fixture
def programs_run(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The words of every program of the worker that was run; the real one needs torch
    (loopback/test_export).
    """
    run: list[tuple[str, ...]] = []

    def run_worker(*words: str) -> str:
        run.append(words)
        done = Exported("/out", 3, "BertForMaskedLM", "float32", 2048, ("model.safetensors",))
        return msgspec.json.encode(done).decode()

    monkeypatch.setattr(export, "run_worker", run_worker)
    return run


def test_a_finished_job_has_its_checkpoint(ctl: Ctl, tmp_path: Path, programs_run: list[Any]) -> None:
    ctl.api.jobs = [job_view(checkpoint="/c/step-00000003")]
    result = ctl("export", "small", str(tmp_path / "out"), "--shard-size", "1MiB", "--dtype", "bfloat16")
    assert (result.exit_code, result.stdout) == (0, "/out\n")
    assert result.stderr == "small after step 3 of 3: BertForMaskedLM, 2 KiB of float32 in 1 file\n"
    assert ctl.api.asked == []
    assert programs_run == [
        (
            "oobleckd.worker.tools.export", "--checkpoint", "/c/step-00000003", "--out",
            str(tmp_path / "out"),
            "--shard-bytes", str(2**20), "--dtype", "bfloat16", "--job", "job-1",
        )
    ]  # fmt: skip


def test_a_running_job_writes_a_checkpoint_first(ctl: Ctl, tmp_path: Path, programs_run: list[Any]) -> None:
    ctl.api.jobs = [job_view(state="running", checkpoint="/a")]

    def act(_path: str, _body: dict[str, Any]) -> Accepted:
        ctl.api.jobs = [job_view(state="running", checkpoint="/b")]
        return Accepted("job-1", "asked")

    ctl.api.on_act = act
    document = ctl.json("export", "small", str(tmp_path / "out"))
    assert (document["kind"], document["step"], document["path"]) == ("Export", 3, "/out")
    assert ctl.api.asked == [("/v1/jobs/job-1/checkpoint", {})]
    assert programs_run[0][2] == "/b"


def test_a_job_that_makes_no_steps_has_its_last_checkpoint(
    ctl: Ctl, tmp_path: Path, programs_run: list[Any]
) -> None:
    ctl.api.jobs = [job_view(state="paused", checkpoint="/a")]
    ctl.api.on_act = lambda _path, _body: Problem("conflict", 409, "it makes none now")
    assert ctl("export", "small", str(tmp_path / "out"), "--overwrite").exit_code == 0
    assert programs_run[0][2] == "/a"
    assert "--overwrite" in programs_run[0]


def test_other_refusals_are_passed_on(ctl: Ctl, tmp_path: Path, programs_run: list[Any]) -> None:
    ctl.api.jobs = [job_view(state="running", checkpoint="/a")]
    ctl.api.on_act = lambda _path, _body: Problem("forbidden", 403, "not by you")
    result = ctl("export", "small", str(tmp_path / "out"))
    assert (result.exit_code, result.stderr) == (5, "error: not by you\n")
    assert programs_run == []


@pytest.mark.parametrize(("state", "code", "ended"), [("queued", 5, "is queued"), ("failed", 1, "failed")])
def test_without_a_checkpoint_there_is_nothing(
    ctl: Ctl, tmp_path: Path, state: str, code: int, ended: str
) -> None:
    ctl.api.jobs = [job_view(state=state, step=0)]
    ctl.api.on_act = lambda _path, _body: Problem("conflict", 409, "it makes none now")
    result = ctl("export", "small", str(tmp_path / "out"))
    assert result.exit_code == code
    assert result.stderr.startswith(f"error: small {ended} at step 0 and has no checkpoint to export\nhint: ")


def test_a_checkpoint_that_does_not_come(ctl: Ctl, tmp_path: Path) -> None:
    ctl.api.jobs = [job_view(state="running", checkpoint="/a")]
    result = ctl("export", "small", str(tmp_path / "out"), "--timeout", "0")
    assert result.exit_code == 124
    assert result.stderr.startswith("error: small: no checkpoint within 0 s\n")


@pytest.mark.parametrize("size", ["much", "0"])
def test_sizes_are_checked(ctl: Ctl, tmp_path: Path, size: str) -> None:
    result = ctl("export", "small", str(tmp_path / "out"), "--shard-size", size)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --shard-size: ")


def test_a_full_folder_is_refused_before_anything_is_asked(ctl: Ctl, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    ctl.api.jobs = [job_view(state="running")]
    for words, problem in [((), "is not empty"), (("--overwrite",), "holds ")]:
        result = ctl("export", "small", str(tmp_path), *words)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {tmp_path} {problem}")
    assert ctl.api.asked == []


def test_an_unknown_job(ctl: Ctl, tmp_path: Path) -> None:
    assert ctl("export", "nobody", str(tmp_path / "out")).exit_code == 3


# --------------------------------------------------------------------------- what others read


def reading(table: str, **values: str) -> Job:
    """A job with other ``values`` in a table."""
    job = job_spec()
    return msgspec.structs.replace(job, **{table: msgspec.structs.replace(getattr(job, table), **values)})


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
@pytest.mark.parametrize("place", ["base", "base/tuned", ".", "link"])
def test_a_folder_that_a_job_reads_is_never_written(
    ctl: Ctl, tmp_path: Path, programs_run: list[Any], words: tuple[str, ...], place: str
) -> None:
    """Nor one in it, nor one that has it, by whatever path."""
    (tmp_path / "base").mkdir()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "deep").symlink_to(tmp_path / "base")
    named = reading("model", checkpoint=str(tmp_path / "link" / "deep"))
    ctl.api.jobs = [job_view(checkpoint="/c/step-00000003", spec=named)]
    result = ctl(
        "export",
        "small",
        str(tmp_path / place if place != "link" else tmp_path / "link" / "deep" / "x"),
        *words,
    )
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert programs_run == []


def test_data_that_a_job_reads_is_never_written(ctl: Ctl, tmp_path: Path, programs_run: list[Any]) -> None:
    named = reading("data", source="text", path=str(tmp_path / "corpus"))
    ctl.api.jobs = [job_view(checkpoint="/c/step-00000003", spec=named)]
    result = ctl("export", "small", str(tmp_path / "corpus" / "model"))
    assert (result.exit_code, programs_run) == (2, [])
    assert "job-1 reads" in result.stderr
    assert "data.path" in result.stderr


def test_a_checkpoint_that_is_gone_before_it_is_held_is_asked_for_anew(
    ctl: Ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruned between the daemon's answer and the hold, and once more while the program starts."""
    folders = [tmp_path / f"step-{number}" for number in range(3)]
    folders[2].mkdir()
    (folders[2] / "manifest.json").touch()
    ctl.api.jobs = [job_view(state="done", checkpoint=str(folders[0]))]
    ran: list[str] = []

    def job(_client: object, _name: str, **_how: bool) -> JobView:
        return job_view(state="done", checkpoint=str(folders[min(len(asked), 2)]))

    asked: list[int] = []

    def again(client: object, name: str, **how: bool) -> JobView:
        view = job(client, name, **how)
        asked.append(1)
        return view

    def run_worker(*words: str) -> str:
        ran.append(words[2])
        return msgspec.json.encode(Exported("/out", 3, "B", "float32", 1, ("f",))).decode()

    monkeypatch.setattr(export, "run_worker", run_worker)
    monkeypatch.setattr("oobleckd.client.Client.job", again)
    assert ctl("export", "small", str(tmp_path / "out")).exit_code == 0
    assert ran == [str(folders[2])]


# --------------------------------------------------------------------------- programs of the worker


def program(folder: Path, text: str) -> str:
    (folder / "a_program.py").write_text(text)
    return "a_program"


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        ("import sys; sys.exit('error: no space\\nhint: make some')", "no space", "make some"),
        ("raise ValueError('oh')", "a_program failed: ValueError: oh", ""),
        ("raise SystemExit(1)", "a_program failed: it said nothing", ""),
    ],
)
def test_a_program_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str, hint: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(Failure) as raised:
        programs.run_worker(program(tmp_path, text))
    assert (raised.value.problem, raised.value.hint) == (problem, hint)


def test_a_program_is_given_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    name = program(tmp_path, "import sys; print(sys.argv[1:])")
    assert programs.run_worker(name, "a", "b c") == "['a', 'b c']\n"
