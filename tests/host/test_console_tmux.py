"""The console in a real terminal: what tmux captures while a node dies is what ``get incidents -o json`` says."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.draw.lines import ms
from tests.helpers.cluster import BIN, Cluster, tiny_job


class Terminal:
    """A tmux server of its own with one window of 160 by 48."""

    def __init__(self, socket: Path, env: dict[str, str]) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        self._env = env

    def run(self, command: str) -> None:
        """Start ``command`` in it."""
        self._ask("new-session", "-d", "-x", "160", "-y", "48", command)

    def screen(self) -> list[str]:
        """The lines on it."""
        return self._ask("capture-pane", "-p").splitlines()

    def end(self) -> None:
        """End the server and what runs in it."""
        self._ask("kill-server")

    def _ask(self, *args: str) -> str:
        done = subprocess.run(
            [*self._tmux, *args], env=self._env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"tmux {args[0]}: {done.stderr}"
        return done.stdout


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, 4) as running:
        yield running


@pytest.fixture
def terminal(tmp_path: Path, cluster: Cluster) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.fail("tmux is not installed; OOBLECK_NO_HOST_TESTS=1 leaves the host tests out")
    terminal = Terminal(tmp_path / "tmux", {**cluster.env, "TERM": "xterm-256color"})
    terminal.run(str(BIN / "oobleck-console"))
    yield terminal
    terminal.end()


def test_a_kill_on_the_screen(cluster: Cluster, terminal: Terminal) -> None:
    job = cluster.client.submit(tiny_job("watched", train={"steps": 100_000})).id
    victim = cluster.at_step(job, 5).pipelines[-1].nodes[0]

    def shown(*words: str) -> list[str] | None:
        screen = terminal.screen()
        return screen if all(any(word in line for line in screen) for word in words) else None

    cluster.until(lambda: shown(job, "running", "nothing has failed"), "the job on the screen")
    cluster.kill(victim, "sigkill")
    cluster.until(lambda: shown(victim, "lost", "total"), "the incident on the screen")
    incident = cluster.until(lambda: closed(cluster), "the incident closed")
    spent: dict[str, float] = {}
    for phase in incident["phases"]:
        spent[phase["phase"]] = spent.get(phase["phase"], 0.0) + phase["duration_s"]
    assert {"detect", "resume"} <= spent.keys()

    def agrees() -> list[str] | None:
        screen = terminal.screen()
        rows = {name: ms(seconds) for name, seconds in spent.items()} | {
            incident["id"]: ms(incident["total_s"])
        }
        found = all(any(name in line and value in line for line in screen) for name, value in rows.items())
        dead = any(victim in line and "lost" in line for line in screen)
        return screen if found and dead else None

    cluster.until(agrees, f"{incident} on the screen:\n" + "\n".join(terminal.screen()), timeout_s=20.0)
    cluster.client.control(job, "cancel")


def closed(cluster: Cluster) -> dict[str, object] | None:
    """The last incident as the command line prints it, once it is over."""
    (incident,) = json.loads(cluster.ctl("get", "incidents", "-o", "json").stdout)["items"]
    return None if incident["open"] else incident
