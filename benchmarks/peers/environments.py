"""Python environments of the peers that this project's own one does not hold: made once, kept in a folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.peers.launch import ROOT

TORCHFT = "torchft-nightly"


class NotAvailable(Exception):
    """A peer that cannot be had here; the message says why in one sentence."""


def torchft_python(folder: Path) -> Path:
    """The interpreter of an environment with torchft, torch and transformers as this project pins them.

    Made below ``folder`` if it is not there, with pip and its configured index. Raises NotAvailable.
    """
    home = folder.absolute() / TORCHFT
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.exists():
        print(f"making {home} (once, some minutes)", file=sys.stderr, flush=True)
        pinned = ["install", "--quiet", "-c", str(ROOT / "constraints.txt")]
        _run([sys.executable, "-m", "venv", str(home)])
        _run([str(python), "-m", "pip", *pinned, "torch==2.13.0"])
        _run([str(python), "-m", "pip", *pinned, TORCHFT, "transformers"])
        ready.touch()
    return python


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise NotAvailable(f"{' '.join(argv[1:4])} … failed: {said[-1][:200]}")
