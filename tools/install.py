"""Install into ``.venv``, stage by stage: the product alone, or after it what its tests and checks need.

    python3 tools/install.py product [--of N]       stages 1 to 3: the environment, torch, the product
    python3 tools/install.py dev [--of N]           stage 4: pytest, mypy and the rest

Says which stage of how many it is in and how many seconds it takes: on a terminal in one line that is
redrawn, elsewhere in plain lines. What pip prints is shown when it fails. Everything is pinned in
``constraints.txt``. Runs before anything is installed, so it uses the standard library alone; ``make``
decides what has to be done again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
# pip would compile every module that comes: 43 s of a processor for 17,000 of them, of which all tests
# together import a tenth. Python compiles those when they are first imported.
PIP = (
    str(VENV / "bin" / "pip"), "install", "--no-compile", "--disable-pip-version-check", "--progress-bar",
    "off",
)  # fmt: skip
PINNED = ("-c", "constraints.txt")
REDRAW_EVERY_S, LINE_EVERY_S = 0.5, 15.0
LINES_OF_A_FAILURE = 30
DOING_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Stage:
    """A command, and what it does in words."""

    number: int
    what: str
    command: tuple[str, ...]


def product() -> list[Stage]:
    """What it takes to train, watch and compare. torch comes on its own: a mistake later does not repeat its
    download.
    """
    made = (VENV / "bin" / "python").exists()
    environment = [] if made else [Stage(1, "make .venv", (sys.executable, "-m", "venv", str(VENV)))]
    return [
        *environment,
        Stage(2, "install torch, the largest download", (*PIP, *PINNED, "torch==2.13.0")),
        Stage(3, "install oobleckd and what it needs", (*PIP, *PINNED, "-e", ".")),
    ]


def dev() -> list[Stage]:
    """What tests, checks and benchmarks need on top."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    return [Stage(4, "install what tests and checks need", (*PIP, *PINNED, *groups["dev"]))]


def shortened(text: str) -> str:
    """``text`` on one line that is not wrapped."""
    return text if len(text) <= DOING_WIDTH else f"{text[:DOING_WIDTH]} ..."


class Line:
    """The line of a stage: redrawn on a terminal, elsewhere written now and then. ``doing``: what pip said
    last.
    """

    def __init__(self, head: str) -> None:
        self.head, self.redrawn, self.doing = head, sys.stdout.isatty(), ""
        self.began = self.written = time.monotonic()
        if not self.redrawn:
            print(f"{head} ...", flush=True)

    def show(self) -> None:
        """How far it is now."""
        now = time.monotonic()
        if self.redrawn:
            text = f"{self.head}  {now - self.began:.0f} s  {self.doing}"
            print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        elif now - self.written >= LINE_EVERY_S:
            self.written = now
            print(f"{self.head}: {now - self.began:.0f} s so far: {shortened(self.doing)}", flush=True)

    def end(self, how: str) -> None:
        """The last that is said of it."""
        again = "\r\033[K" if self.redrawn else ""
        print(f"{again}{self.head}: {how} {time.monotonic() - self.began:.0f} s", flush=True)


def run(stage: Stage, num_stages: int) -> int:
    """Run ``stage`` and return its exit status."""
    line = Line(f"[{stage.number}/{num_stages}] {stage.what}")
    said: deque[str] = deque(maxlen=LINES_OF_A_FAILURE)
    code = _follow(stage.command, said, line)
    line.end("done in" if code == 0 else f"failed ({code}) after")
    if code:
        print("\n".join(said), file=sys.stderr)
    return code


def _follow(command: tuple[str, ...], said: deque[str], line: Line) -> int:
    """Run ``command`` with a line of how far it is; what it printed last is left in ``said``."""
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as running:  # fmt: skip
        assert running.stdout is not None
        reader = threading.Thread(target=_read, args=(running.stdout, said, line), daemon=True)
        reader.start()
        try:
            while reader.is_alive():
                reader.join(REDRAW_EVERY_S)
                line.show()
        except BaseException:
            running.terminate()
            raise
    return running.returncode


def _read(output: Iterable[str], said: deque[str], line: Line) -> None:
    for text in filter(None, map(str.strip, output)):
        said.append(text)
        if not text.startswith("WARNING"):
            line.doing = text


def main() -> int:
    """Run the stages; the status of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("product", "dev"))
    parser.add_argument(
        "--of", type=int, default=0, metavar="N", help="stages there are, with those of others"
    )
    options = parser.parse_args()
    stages = product() if options.what == "product" else dev()
    try:
        for stage in stages:
            if code := run(stage, options.of or stages[-1].number):
                return code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
