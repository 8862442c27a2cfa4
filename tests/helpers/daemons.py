"""A real daemon process on folders of a test, and a client for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from oobleckd.client import Client
from oobleckd.daemon import keys
from tests.helpers.agents import Agent

READY = "ready: api on"


@dataclass
class Daemon:
    """A running ``oobleckd``. Its log is read up to the line that says ready."""

    folder: Path
    process: subprocess.Popen[str]
    client: Client
    endpoint: str

    def agent(self, node: str) -> Agent:
        """A connection with the key of ``node``, which may join from now on after a reload."""
        pair = keys.load_pair(keys.node_secret_path(self.folder / "keys", node))
        return Agent(self.endpoint, pair, keys.load_public(keys.server_public_path(self.folder / "keys")))

    def log_until(self, wanted: str) -> str:
        """The next line of the log that has ``wanted``; "" when the log ends first."""
        assert self.process.stderr is not None
        return next((line for line in self.process.stderr if wanted in line), "")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(how)
        return self.process.wait(120)


def command(folder: Path, *flags: str) -> list[str]:
    """The command line of a daemon on ``folder``."""
    return [
        sys.executable, "-m", "oobleckd.daemon.app", "--state-dir", str(folder / "state"), "--keys-dir",
        str(folder / "keys"), "--socket", str(folder / "d.sock"), "--endpoint", "tcp://127.0.0.1:0", *flags,
    ]  # fmt: skip


@contextmanager
def daemon(folder: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Daemon]:
    """Start a daemon, wait until it is ready, and end it after the test (also a stopped one)."""
    process = subprocess.Popen(
        command(folder, *flags), stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if READY in line:
                break
        else:
            raise AssertionError("the daemon did not start:\n" + "".join(lines))
        client = Client(folder / "d.sock")
        yield Daemon(folder, process, client, client.status().endpoint)
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()
