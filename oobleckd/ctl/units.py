"""The files of a service: units, user and folders, as they belong to one installation.

Owns their texts (templates in ``systemd``, which a link makes a part of the package), their places below a
root folder, and how they are written and removed. Runs nothing and says nothing (``systemd``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from oobleckd.host.durable import write_whole

USER = "oobleck"
DAEMON_UNIT = "oobleckd.service"
SOCKET_UNIT = "oobleckd.socket"
WORKER_UNIT = "oobleck-worker@.service"
TARGET = "oobleck-workers.target"

# Where a file goes below the root folder -> its template.
_UNITS = {f"etc/systemd/system/{name}": name for name in (SOCKET_UNIT, DAEMON_UNIT, WORKER_UNIT, TARGET)}
SYSUSERS = "etc/sysusers.d/oobleck.conf"
TMPFILES = "etc/tmpfiles.d/oobleck.conf"
_TEMPLATES = {**_UNITS, SYSUSERS: "sysusers.conf", TMPFILES: "tmpfiles.conf"}

State = Literal["new", "changed", "same"]


@dataclass(frozen=True, slots=True)
class UnitAccount:
    """Whom daemon and workers run as."""

    user: str = USER
    group: str = USER


@dataclass(frozen=True, slots=True)
class File:
    """One file: where it goes, and what is in it."""

    path: Path
    text: str

    @property
    def state(self) -> State:
        """How writing it would change what is there."""
        try:
            return "same" if self.path.read_text(encoding="utf-8") == self.text else "changed"
        except (FileNotFoundError, NotADirectoryError):
            return "new"
        except UnicodeDecodeError:
            return "changed"

    def write(self) -> None:
        """Whole or not at all. Raises OSError."""
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_whole(self.path, self.text.encode())
        self.path.chmod(0o644)  # whatever the umask


def rendered(root: Path, programs: Path, account: UnitAccount) -> tuple[File, ...]:
    """All files below ``root`` for the commands in the folder ``programs``.

    A user that is not ours is not made: then there is no sysusers file.
    """
    wanted = (
        _TEMPLATES if account.user == USER else {to: of for to, of in _TEMPLATES.items() if to != SYSUSERS}
    )
    words = {"@BIN@": str(programs), "@USER@": account.user, "@GROUP@": account.group}
    return tuple(File(root / to, _filled(template, words)) for to, template in wanted.items())


def installed(root: Path) -> tuple[Path, ...]:
    """Those of our files that are there."""
    return tuple(root / to for to in _TEMPLATES if (root / to).exists())


def unreachable(path: Path) -> str:
    """Why a service under another user cannot run the program ``path``; "" when it can. Raises OSError."""
    for place in (path.absolute(), path.resolve()):
        for folder in (Path("/tmp"), Path("/var/tmp")):  # noqa: S108 - not used, but hidden from services
            if place.is_relative_to(folder):
                return f"{place} lies below {folder}, which is private to each service"
        for part in reversed((place, *place.parents)):
            if not _others_may(os.X_OK, part):
                return f"{place}: {part} is closed to other users"
    return ""


def _others_may(right: int, path: Path) -> bool:
    return path.stat().st_mode & right == right


def _filled(template: str, words: dict[str, str]) -> str:
    text = files("oobleckd").joinpath("systemd", template).read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(word, value)
    return text


def write_all(found: Iterable[File]) -> tuple[tuple[File, State], ...]:
    """Write what is new or changed; each file with what was done. Raises OSError."""
    done = tuple((file, file.state) for file in found)
    for file, state in done:
        if state != "same":
            file.write()
    return done
