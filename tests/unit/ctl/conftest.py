"""A command line that talks to prepared answers over a real socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from oobleckd.ctl import look
from oobleckd.ctl.main import main
from tests.helpers.api_server import Api, serving, status_view
from tests.helpers.cluster import with_base


@dataclass(frozen=True, slots=True)
class Ctl:
    """``oobleckctl`` in this process."""

    api: Api
    socket: Path

    def __call__(self, *words: str) -> Result:
        return CliRunner().invoke(main, ["--socket", str(self.socket), *words], catch_exceptions=False)

    def json(self, *words: str) -> Any:
        """The document that ``-o json`` prints; the command must succeed."""
        result = self(*words, "-o", "json")
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)


@pytest.fixture
def ctl(tmp_path: Path) -> Iterator[Ctl]:
    socket = tmp_path / "s"
    with serving(socket, Api(status_view(tmp_path / "state"))) as api:
        yield Ctl(api, socket)


@pytest.fixture(autouse=True)
def _trainable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node would take every job: nobody asks a worker's program."""
    monkeypatch.setattr(look, "run_worker", lambda *_words: "{}")


@pytest.fixture
def based(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of the worker are forks, which do not load torch."""
    for name, value in with_base().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a job.toml; the text is added to a valid one."""

    def write(more: str = "") -> Path:
        file = tmp_path / "job.toml"
        file.write_text(
            'name = "small"\n[train]\nsteps = 3\nglobal_batch = 4\nmicro_batch = 2\nsequence = 8\n' + more,
            encoding="utf-8",
        )
        return file

    return write
