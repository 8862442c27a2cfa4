"""``submit --if-new`` at a real daemon: the same job is submitted once, an edited one is another."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from oobleckd.ctl import look
from oobleckd.ctl.main import main
from tests.helpers.daemons import Daemon, daemon

JOB = """name = 'small'  # single quotes, and a comment
[train]
steps = {steps}
global_batch = 4
micro_batch = 2
sequence = 8
"""


def handed_in(running: Daemon, file: Path, *options: str) -> str:
    words = ["--socket", str(running.client.socket_path), "submit", str(file), "--no-wait", *options]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


def test_the_same_job_is_handed_in_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "run_worker", lambda *_words: "{}")  # no node is here to be like
    file = tmp_path / "job.toml"
    with daemon(tmp_path) as running:
        file.write_text(JOB.format(steps=3))
        first = handed_in(running, file, "--if-new")
        assert handed_in(running, file, "--if-new") == first
        assert handed_in(running, file) != first  # who does not ask gets another
        file.write_text(JOB.format(steps=4))
        edited = handed_in(running, file, "--if-new")
        assert len(running.client.jobs()) == 3
        assert running.client.job(edited).spec.train.steps == 4
        running.client.control(edited, "cancel")
        assert handed_in(running, file, "--if-new") != edited
