"""What ``doctor`` finds of the limits of this machine: open files, tasks, /dev/shm, locked memory; measured
by what a cluster takes (``needs``).

Each check is a function of the limit and the cluster, and answers with one ``CheckupItem``.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from oobleckd.ctl.checkup import CheckupItem, Level
from oobleckd.host.needs import ClusterSize, devices_for, nodes_for
from oobleckd.host.rlimits import RAISE_FILES
from oobleckd.words import count, size

_NO_LIMIT = resource.RLIM_INFINITY
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_SHM = Path("/dev/shm")  # noqa: S108 - looked at, not used
_INFINIBAND = Path("/sys/class/infiniband")
_FIRST_NAMESPACE = ["0", "0", str((1 << 32) - 1)]
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE, _CAP_IPC_LOCK = 21, 24, 14  # linux/capability.h


def open_files(cluster: ClusterSize, hard: int | None = None) -> CheckupItem:
    """The limit of open files of programs that are started from here: they raise their own up to it."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else hard
    if allowed == _NO_LIMIT:
        return CheckupItem("open files", "ok", "no limit")
    reach = f"jobs on {count(devices_for(allowed, cluster.kind), 'device')}"
    if cluster.daemon:
        reach += f", a daemon of {count(nodes_for(allowed), 'node')}"
    text = f"{allowed:,} for a process: enough for {reach}"
    if allowed >= cluster.files():
        return CheckupItem("open files", "ok", text)
    least, wanted = cluster.files(least=True), cluster.files()
    text = (
        f"{allowed:,} for a process, and {_of(cluster)} takes {least:,}, {wanted:,} with users and strangers"
    )
    return CheckupItem("open files", "fail" if allowed < least else "warn", text, RAISE_FILES, "few-files")


def tasks(
    cluster: ClusterSize, *, running: bool = False, user: int | None = None, proc: Path = _PROC,
    cgroups: Path = _CGROUPS,
) -> CheckupItem:  # fmt: skip
    """Whether all processes and threads can be there: of this user (RLIMIT_NPROC), of the control groups that
    this process is in. ``running``: those of the cluster are there, and counted, already.
    """
    wanted = 0 if running else cluster.tasks()
    needed = f" ({_of(cluster)} takes {wanted:,})" if wanted else ""
    rooms = [*_room_of_user(user, proc), *_room_of_groups(proc, cgroups)]
    if not rooms:
        return CheckupItem("tasks", "ok", f"no limit{needed}")
    room, whose, hint = min(rooms)
    if room >= wanted and room > 0:
        return CheckupItem("tasks", "ok", f"room for {room:,} threads more{needed}; {whose}")
    takes = f", and {_of(cluster)} takes {wanted:,}" if wanted else ""
    text = f"room for {max(0, room):,} threads more{takes}; {whose}"
    return CheckupItem("tasks", "fail", text, hint, "few-tasks")


def _room_of_user(user: int | None, proc: Path) -> Iterator[tuple[int, str, str]]:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0] if user is None else user
    if limit == _NO_LIMIT or _may(_CAP_SYS_RESOURCE, proc) or _may(_CAP_SYS_ADMIN, proc):
        return  # the kernel holds nobody to it who may do that
    hint = "raise it: LimitNPROC= of the unit, `ulimit -u`, or /etc/security/limits.conf"
    yield limit - _tasks_of(os.getuid(), proc), f"`ulimit -u` is {limit:,}", hint


def _tasks_of(uid: int, proc: Path) -> int:
    """Threads that this user has."""
    found = 0
    for status in proc.glob("[0-9]*/status"):
        try:
            text = status.read_text(encoding="ascii", errors="replace")
        except OSError:  # it has ended
            continue
        if _said(text, "Uid") == str(uid):
            found += int(_said(text, "Threads") or 0)
    return found


def _room_of_groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, str, str]]:
    for folder in _groups(proc, cgroups):
        limit, now = _number(folder / "pids.max"), _number(folder / "pids.current")
        if limit is not None and now is not None:
            hint = "raise it: TasksMax= of the unit; docker: --pids-limit; Kubernetes: podPidsLimit"
            yield limit - now, f"{folder / 'pids.max'} is {limit:,}", hint


def _groups(proc: Path, cgroups: Path) -> Iterator[Path]:
    """The control group of this process that counts tasks, and those that it is in."""
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "pids" not in controllers.split(","):
            continue
        top = cgroups / "pids" if controllers else cgroups
        folder = top / path.lstrip("/")
        yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(top)))


def _number(file: Path) -> int | None:
    """What stands in it; None: there is no such file, or no limit."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _may(capability: int, proc: Path) -> bool:
    """Whether this process has a capability that frees it of a limit: in the first user namespace alone."""
    try:
        status = (proc / "self/status").read_text(encoding="ascii", errors="replace")
        namespace = (proc / "self/uid_map").read_text(encoding="ascii").split()
    except OSError:
        return False
    return namespace == _FIRST_NAMESPACE and bool(int(_said(status, "CapEff") or "0", 16) >> capability & 1)


def _said(status: str, name: str) -> str:
    """The first word of a line of /proc/PID/status; "" where there is none."""
    found = re.search(rf"^{name}:\s+(\S+)", status, re.MULTILINE)
    return found[1] if found else ""


def shared_memory(cluster: ClusterSize, folder: Path = _SHM) -> CheckupItem:
    """Room for what processes of one machine share."""
    about, wanted = (str(folder),), cluster.shared_bytes()
    if not wanted:
        return CheckupItem("shared memory", "ok", f"nothing is put into {folder}")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        hint = f"mount a tmpfs at {folder}"
        return CheckupItem(
            "shared memory", "fail", f"{folder} cannot be written to", hint, "not-writable", about
        )
    free = shutil.disk_usage(folder).free
    text = f"{size(free)} free in {folder}"
    if free < wanted:
        hint = "enlarge it (docker: --shm-size; Kubernetes: an emptyDir with medium: Memory)"
        text = f"{text}, and {_of(cluster)} takes {size(wanted)}"
        return CheckupItem("shared memory", "fail", text, hint, "little-room", about)
    return CheckupItem("shared memory", "ok", text)


def locked_memory(
    cluster: ClusterSize, limit: int | None = None, cards: Path = _INFINIBAND, proc: Path = _PROC
) -> list[CheckupItem]:
    """What a process may lock of the host's memory, where GPUs talk through cards that need it (RDMA). What
    CUDA pins is not counted by the kernel.
    """
    names = tuple(sorted(path.name for path in cards.iterdir())) if cards.is_dir() else ()
    if cluster.kind != "cuda" or not names:
        return []
    allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if allowed == _NO_LIMIT or _may(_CAP_IPC_LOCK, proc):
        return [CheckupItem("locked memory", "ok", "no limit", about=names)]
    wanted = cluster.locked_bytes()
    text = f"{size(allowed)} for a process that uses {', '.join(names)}; {_of(cluster)} takes {size(wanted)}"
    if allowed >= wanted > 0:
        return [CheckupItem("locked memory", "ok", text, about=names)]
    hint = "lift it: LimitMEMLOCK=infinity of the unit, `ulimit -l unlimited`"
    level: Level = "fail" if wanted else "warn"
    return [CheckupItem("locked memory", level, text, hint, "little-locked", names)]


def _of(cluster: ClusterSize) -> str:
    return f"a cluster of {count(cluster.nodes, 'node')}, {count(cluster.devices, 'device')}"
