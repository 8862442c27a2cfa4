"""A program as another node runs it: under another host name, or with other folders where this one's are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_UNSHARE = ("unshare", *(() if os.geteuid() == 0 else ("--map-root-user",)))


def named(name: str, *command: str) -> tuple[str, ...]:
    """``command`` on a host that is called ``name``."""
    return (*_UNSHARE, "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name, *command)


def seeing(folders: Mapping[Path, Path], *command: str) -> tuple[str, ...]:
    """``command``, and all that it starts; what it sees at a place of ``folders`` is the folder there."""
    binds = [f"mount --bind {folder} {place}" for place, folder in folders.items()]
    script = " && ".join((*binds, 'exec "$0" "$@"'))
    return (*_UNSHARE, "--mount", "--propagation", "private", "sh", "-c", script, *command)
