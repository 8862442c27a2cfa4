"""``submit`` looks at the folder of a job's model first: what is wrong with it, and what it says
of the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from oobleckd.ctl import folder
from oobleckd.ctl.output import Failure
from oobleckd.host.jobfile import load_job
from oobleckd.protocol.modelnotes import FolderNote
from tests.helpers.api_server import job_view
from tests.unit.ctl.conftest import Ctl

TOLD = '[{"kind":"unread","count":9,"names":["a","b"]}]'


@pytest.fixture
def with_folder(job_file: Callable[..., Path], tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return job_file(f'[model]\ncheckpoint = "{tmp_path / "m"}"\n')


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_submit_says_what_is_not_used(
    ctl: Ctl, with_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    asked = []

    def run_worker(module: str, _option: str, file: str) -> str:
        asked.append((module, load_job(Path(file)).model.checkpoint))
        return TOLD

    monkeypatch.setattr(folder, "run_worker", run_worker)
    result = ctl("submit", str(with_folder), *words)
    assert result.exit_code == 0
    assert asked == [("oobleckd.worker.tools.look", str(tmp_path / "m"))]
    assert f"{tmp_path}/m: 9 tensors of the folder are used by nothing: a, b and 7 more\n" in result.stderr
    assert len(ctl.api.asked) == (not words)


def test_a_job_that_is_resumed_takes_nothing_of_the_folder(
    ctl: Ctl, with_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "run_worker", lambda *_: TOLD)
    assert "used by nothing" not in ctl("submit", str(with_folder), "--resume").stderr


def test_a_bad_folder_is_not_handed_in(ctl: Ctl, with_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_worker(*_: str) -> str:
        raise Failure("model.checkpoint: m/config.json has quantization_config", "name another")

    monkeypatch.setattr(folder, "run_worker", run_worker)
    result = ctl("submit", str(with_folder))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {with_folder}: model.checkpoint: m/config.json has quantization_config\n" in result.stderr
    assert "hint: name another" in result.stderr
    assert not ctl.api.asked


def test_where_there_is_no_torch_the_nodes_look(
    ctl: Ctl, with_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_NEEDED", ("no_such_library",))
    result = ctl("submit", str(with_folder))
    assert result.exit_code == 0
    assert "is looked at by the nodes" in result.stderr


def test_describe_shows_the_notes(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(notes=(FolderNote("fresh", 1, ("lm_head.weight",)),))]
    shown = ctl("describe", "job", "small").stdout
    assert "1 tensor is not in the folder and begins fresh: lm_head.weight" in shown
    assert ctl.json("describe", "job", "small")["notes"][0]["kind"] == "fresh"
