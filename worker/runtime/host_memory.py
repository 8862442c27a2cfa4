"""Reads the host's memory: how much of it a process had, how much it may have, and whether the kernel has
just killed for want of it.

Owns no judgement. Never imports torch: the agent looks here.
"""

from __future__ import annotations

import os
import re
import resource
from contextlib import suppress
from pathlib import Path

from oobleckd.protocol.deaths import Memory


def memory_of_host(used: int, wanted: int = 0) -> Memory:
    """What a process, which has ``used`` at most, and others have of the host's memory."""
    host = _kib(Path("/proc/meminfo"))
    whole = host.get("MemTotal", 0)
    others = max(0, whole - host.get("MemAvailable", 0) - used)
    return Memory(used, min([whole, *_limits()]), wanted, others)


def most_of(pid: int | str) -> int:
    """The most memory, in bytes, that a process has had so far; 0 where the kernel does not tell
    (any more).
    """
    return _kib(Path(f"/proc/{pid}/status")).get("VmHWM", 0)


def forget_most() -> None:
    """From now on the most memory that this process had is what it has now."""
    with suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _limits() -> list[int]:
    """What this process may have at most, as far as somebody set that."""
    found = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(file).read_text(encoding="ascii").strip()
        except OSError:
            continue
        found += [int(text)] if text.isdecimal() else []
    return [limit for limit in found if limit != resource.RLIM_INFINITY]


def _kib(file: Path) -> dict[str, int]:
    """Fields of a file of /proc that are so many kB, in bytes."""
    try:
        lines = file.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    parts = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): 1024 * int(value) for name, value, _ in parts}


class OomKills:
    """How often the kernel has killed for want of memory in this process' control group, or on this host
    where that does not tell.
    """

    RECENT_S = 5.0

    def __init__(self, files: tuple[Path, ...] | None = None) -> None:
        found = files if files is not None else _counters()
        self._fd = next((os.open(file, os.O_RDONLY | os.O_CLOEXEC) for file in found if file.exists()), -1)
        self._count = self._read()
        self._rose_s = float("-inf")

    def look(self, now_s: float) -> bool:
        """Whether it has killed within the last seconds. To be asked often."""
        count = self._read()
        if count > self._count:
            self._rose_s = now_s
        self._count = count
        return now_s - self._rose_s < self.RECENT_S

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> int:
        if self._fd < 0:
            return 0
        found = re.search(rb"^oom_kill (\d+)$", os.pread(self._fd, 1 << 16, 0), re.MULTILINE)
        return int(found[1]) if found else 0


def _counters() -> tuple[Path, ...]:
    """Where the kernel counts, the nearest first."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    files = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers:
            files.append(Path(f"/sys/fs/cgroup{path}/memory.events"))
        elif "memory" in controllers.split(","):
            files += [Path(f"/sys/fs/cgroup/memory{each}/memory.oom_control") for each in (path, "")]
    return (*files, Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))
