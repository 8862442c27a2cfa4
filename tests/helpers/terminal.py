"""A real terminal: a tmux server of its own with one window, keys that are pressed in it, and what is on it.

Owns the server and ends it. What is waited for belongs to the test.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

NO_TMUX = "tmux is not installed: apt-get install tmux"


class Terminal:
    """A window of ``width`` by ``height`` in which ``command`` runs. Raises FileNotFoundError where there is
    no tmux.
    """

    def __init__(
        self, socket: Path, command: str, env: Mapping[str, str], *, width: int = 160, height: int = 46
    ) -> None:
        if shutil.which("tmux") is None:
            raise FileNotFoundError(NO_TMUX)
        self._tmux = ["tmux", "-u", "-S", str(socket), "-f", "/dev/null"]
        # A size in the environment, as pytest's workers have one, would be believed before the window's.
        sized = {name: value for name, value in env.items() if name not in {"COLUMNS", "LINES"}}
        self._env = {**sized, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        self._command = command
        self._size = (width, height)

    def __enter__(self) -> Self:
        width, height = self._size
        # The screen stays when the command ends, so that a failure shows what it said.
        self._ask(
            "new-session", "-d", "-x", str(width), "-y", str(height), f"{self._command}; exec sleep infinity"
        )
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._ask("kill-server", check=False)

    def lines(self) -> list[str]:
        """What is on the screen."""
        return self._ask("capture-pane", "-p").splitlines()

    def text(self) -> str:
        """The same in one."""
        return "\n".join(self.lines())

    def row(self, *parts: str) -> str | None:
        """The first line that has all of ``parts``."""
        return next((line for line in self.lines() if all(part in line for part in parts)), None)

    def press(self, *keys: str) -> None:
        """Press keys by tmux's names (``Enter``, ``Escape``, ``Left``, ``1``)."""
        self._ask("send-keys", *keys)

    def type(self, text: str) -> None:
        """Type ``text``."""
        self._ask("send-keys", "-l", text)

    def write(self, text: str) -> None:
        """Type ``text`` and Enter."""
        self.type(text)
        self.press("Enter")

    def resize(self, width: int, height: int) -> None:
        """Another size of the window."""
        self._ask("resize-window", "-x", str(width), "-y", str(height))

    def _ask(self, *args: str, check: bool = True) -> str:
        done = subprocess.run(
            [*self._tmux, *args], env=self._env, capture_output=True, text=True, check=False, timeout=30
        )
        assert not check or done.returncode == 0, f"tmux {args[0]}: {done.stderr}"
        return done.stdout
