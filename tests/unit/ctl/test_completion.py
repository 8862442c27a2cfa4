"""What a shell is told: verbs without loading them, names from the daemon, nothing where nobody answers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from oobleckd.ctl.main import VERBS, main
from tests.helpers.api_server import job_view, node_view
from tests.unit.ctl.conftest import Ctl
from tests.unit.ctl.test_verbs import INCIDENT


def completed(*words: str) -> list[str]:
    """What may stand for the last word."""
    shell = ShellComplete(main, {}, "oobleckctl", "_OOBLECKCTL_COMPLETE")
    return [item.value for item in shell.get_completions(list(words[:-1]), words[-1])]


def test_verbs_and_options() -> None:
    assert completed("do") == ["down", "doctor"]
    assert completed("") == list(VERBS)
    assert "--socket" in completed("--so")
    assert completed("get", "n") == ["nodes"]
    assert completed("kill-node", "--how", "sigk") == ["sigkill"]
    assert completed("plan", "--device", "h") == ["h100", "h200"]


def test_names(ctl: Ctl) -> None:
    ctl.api.jobs = [job_view()]
    ctl.api.nodes = [node_view("node-1"), node_view("node-2")]
    ctl.api.incidents = [INCIDENT]
    socket = ("--socket", str(ctl.socket))
    assert completed(*socket, "pause", "") == ["small", "job-1"]
    assert completed("pause", *socket, "s") == ["small"]
    assert completed(*socket, "kill-node", "node-1", "no") == ["node-1", "node-2"]
    assert completed(*socket, "drain", "x") == []
    assert completed(*socket, "describe", "incident", "") == ["inc-1"]
    assert completed(*socket, "describe", "node", "node-2") == ["node-2"]


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOBLECK_SOCKET", "/nowhere/s")
    assert completed("pause", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"_OOBLECKCTL_COMPLETE={shell}_complete" in result.stdout.replace("env ", "")


def test_completing_a_verb_is_quick() -> None:
    code = (
        "import sys; from click.shell_completion import ShellComplete; from oobleckd.ctl.main import main;"
        "ShellComplete(main, {}, 'o', 'O').get_completions([], 'g');"
        "print([m for m in sys.modules if m.startswith('oobleckd.ctl.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['oobleckd.ctl.main']\n"
