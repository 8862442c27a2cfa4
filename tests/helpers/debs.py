"""Debian's packages for a box: downloaded by apt to a folder of ours, installed in the throw-away system
alone.

This machine gets nothing but the files, in ``OOBLECK_DEBS`` or ~/.cache/oobleck/debs, where they stay for the
next time.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.helpers.bootbox import BootBox

INSIDE = "/opt/debs"
_APT = ("apt-get", "--yes", "--quiet", "-o", "Debug::NoLocking=1")


class NoPackages(Exception):
    """Packages cannot be had: this is no Debian, or apt reaches no mirror."""


def fetch(*packages: str) -> Path:
    """A folder with ``packages`` and what they need of what is not installed here. Raises NoPackages."""
    base = Path(os.environ.get("OOBLECK_DEBS") or Path.home() / ".cache" / "oobleck" / "debs")
    folder = base / "+".join(sorted(packages))
    if list(folder.glob("*.deb")):
        return folder
    (folder / "partial").mkdir(parents=True, exist_ok=True)
    command = [
        *_APT, "-o", f"Dir::Cache::archives={folder}", "install", "--download-only",
        "--no-install-recommends", *packages,
    ]  # fmt: skip
    if _run(command).returncode == 0:
        return folder
    _run([*_APT, "update"])  # its lists may be of last month, or none
    done = _run(command)
    if done.returncode != 0:
        raise NoPackages(
            f"apt-get cannot have {', '.join(packages)}: {done.stderr.strip().splitlines()[-1:]}"
        )
    return folder


def install(box: BootBox) -> None:
    """Install in ``box`` what is bound at INSIDE. Services that packages start are started."""
    box.run(
        "sh", "-c",
        f"DEBIAN_FRONTEND=noninteractive dpkg --force-confold --install {INSIDE}/*.deb >/tmp/dpkg.log 2>&1 "
        "|| { tail -n 30 /tmp/dpkg.log; exit 1; }",
    )  # fmt: skip


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise NoPackages("there is no apt-get on this machine") from error
