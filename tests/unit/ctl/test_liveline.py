"""How far a job is while somebody waits for it: on a terminal alone, and what Ctrl-C says."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from oobleckd.ctl import waiting
from oobleckd.ctl.liveline import progress_words
from oobleckd.protocol.jobviews import ProgressView
from tests.helpers.api_server import job_spec, job_view, node_view
from tests.unit.ctl.conftest import Ctl

RUNNING = {"state": "running", "finished_at": None, "step": 120, "steps": 2000}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "job-1  running  step 120/2,000 (6%)  loss 5.5000  80.0 tokens/s  about 12 min 32 s left"),
        (
            {"progress": ProgressView(left_s=61.0, tokens_per_s=8123.0), "loss": None},
            "job-1  running  step 120/2,000 (6%)  8,123 tokens/s  about 1 min 1 s left",
        ),
        ({"step_s": 0.0, "samples_per_s": 0.0}, "job-1  running  step 120/2,000 (6%)  loss 5.5000"),
        (
            {"step": 1999, "loss": None, "step_s": 0.0, "samples_per_s": 0.0},
            "job-1  running  step 1,999/2,000 (99%)",
        ),
        (
            {"state": "waiting", "reason": "for nodes\x1b[2J"},
            "job-1  waiting  step 120/2,000 (6%)  for nodes\\x1b[2J",
        ),
    ],
)
def test_words(changes: dict[str, object], words: str) -> None:
    assert progress_words(job_view(**(RUNNING | changes))) == words


def watched(ctl: Ctl, *words: str) -> tuple[int, str]:
    """Exit code and what a terminal showed of a command that Ctrl-C ends once it has shown a line."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "oobleckd.ctl.main", "--socket", str(ctl.socket), *words]
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stderr=theirs, stdout=subprocess.DEVNULL) as process:
        os.close(theirs)
        while b"step 120/2,000" not in shown:
            shown += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        reader = threading.Thread(target=process.wait)
        reader.start()
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # its end of the terminal is closed
            pass
        reader.join()
    os.close(ours)
    return process.returncode, shown.decode()


@pytest.mark.parametrize("verb", ["wait", "submit", "verify", "drill"])
def test_ctrl_c_says_that_the_job_goes_on(
    ctl: Ctl, tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    ctl.api.jobs = [job_view(**RUNNING)]
    if verb == "verify":
        ctl.api.jobs.append(job_view(id="job-2", name="over", checkpoint="/c"))
    file = tmp_path / "job.toml"
    file.write_text('name = "small"\n[train]\nsteps = 3\nglobal_batch = 4\nmicro_batch = 2\nsequence = 8\n')
    assert job_spec().name == "small"
    script = tmp_path / "drill.toml"
    script.write_text("[[fault]]\nwho = 'node-1'\nstep = 500\n")
    ctl.api.nodes = [node_view("node-1")]
    words = {
        "drill": ("drill", str(script), "--job", "job-1"),
        "wait": ("wait", "job-1", "--for", "step=500"),
        "verify": ("verify", "over"),
        "submit": ("submit", str(file), "--wait", "--if-new"),
    }
    code, shown = watched(ctl, *words[verb])
    assert code == 130
    assert "\x1b[2Kjob-1 goes on without this command: `oobleckctl logs job-1 -f` shows it, " in shown
    assert "\x1b[2K" in shown


def test_a_log_has_no_use_for_it(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view(**RUNNING)]
    result = ctl("wait", "small", "--for", "step=500", "--timeout", "0.01")
    assert result.exit_code == 124
    assert "tokens/s" not in result.stderr


@pytest.mark.parametrize("words", [("wait", "job-1", "--for", "step=500"), ("verify", "over")])
def test_a_log_hears_why_a_job_stands_still(
    ctl: Ctl, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, however often it is looked at, and again when it has gone on meanwhile."""
    why = "for a sign of life"
    standing = job_view(**(RUNNING | {"state": "waiting", "reason": why}))
    running, over = job_view(**RUNNING), job_view(**(RUNNING | {"state": "cancelled"}))
    looks = (standing, standing, running, standing, standing, over)
    monkeypatch.setattr(waiting, "views", lambda *_: iter(looks))
    ctl.api.jobs = [running, job_view(id="job-2", name="over", checkpoint="/c")]
    result = ctl(*words)
    assert result.exit_code != 0
    assert result.stderr.count(f"{standing.id} is waiting: {why}") == 2


def test_a_log_hears_of_a_pause_too(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    """For which nobody gave a reason; and nothing of a job that is queued for a moment, without one."""
    queued, paused, over = (
        job_view(**(RUNNING | {"state": state, "reason": ""})) for state in ("queued", "paused", "cancelled")
    )
    monkeypatch.setattr(waiting, "views", lambda *_: iter((queued, paused, paused, over)))
    ctl.api.jobs = [job_view(**RUNNING)]
    said = ctl("wait", "job-1", "--for", "step=500").stderr.splitlines()
    assert said[0] == f"{paused.id} is paused"
    assert not any("queued" in line for line in said)
    assert sum("paused" in line for line in said) == 1
