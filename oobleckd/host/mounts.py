"""On which kind of file system a path lies, and whether a journal may lie there.

A leaf for the daemon, which says so at its start, and for ``doctor``. The kernel's list of mounts is read,
not the file system itself: one whose server is away answers nobody.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import msgspec

MOUNTS = Path("/proc/self/mountinfo")
Unfit = Literal["", "network", "unknown", "memory", "container"]
# SQLite's write-ahead log needs memory that all its readers share, and locks that hold: what a file system on
# another machine does not promise (sqlite.org/wal.html). Lustre, GPFS and CephFS do.
_NETWORK = frozenset({
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "coda", "9p", "davfs", "fuse.sshfs", "fuse.s3fs",
    "fuse.gcsfuse", "fuse.goofys", "fuse.mountpoint-s3", "fuse.rclone", "fuse.blobfuse", "fuse.blobfuse2",
    "fuse.davfs2", "fuse.curlftpfs", "fuse.smbnetfs", "fuse.hdfs", "fuse.fuse_dfs", "fuse.gvfsd-fuse",
})  # fmt: skip
_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_CONTAINER = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs", "fuse.unionfs", "fuse.mergerfs"})
_POINT = 4  # the field of a line of mountinfo
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True):
    """A mounted file system: where, and of which kind ("": not known)."""

    point: str
    kind: str

    @property
    def unfit(self) -> Unfit:
        """Why no journal should lie there; "": it may. network: its log and its locks may not hold. unknown:
        nobody knows whether they do. memory: it is gone when the machine restarts; container: when that is
        removed.
        """
        if self.kind in _NETWORK:
            return "network"
        if self.kind in _MEMORY:
            return "memory"
        if self.kind in _CONTAINER:
            return "container"
        return "unknown" if self.kind == "fuse" or self.kind.startswith("fuse.") else ""


def mount_of(path: Path, mounts: Path = MOUNTS) -> Mount:
    """What ``path``, or the folder that it would be made in, lies on."""
    real = os.path.realpath(path)
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Mount("/", "")
    found = Mount("/", "")
    for line in lines.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.split(" ")[0]
        if len(fields) <= _POINT:
            continue
        point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[_POINT])
        # Of two at one place the later one hides the other.
        if _is_below(real, point) and len(point) >= len(found.point):
            found = Mount(point, kind)
    return found


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")
