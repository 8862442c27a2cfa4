"""What ``doctor`` looks at on this machine: versions, clock, disks (``limitcheck``: limits; ``gpucheck``:
GPUs). Nothing here asks a daemon.

Each check is a function of what it is about and answers with one ``CheckupItem``, so that a test can hand it
any machine.
"""

from __future__ import annotations

import ctypes
import operator
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from oobleckd.host.compilers import INSTALL, cxx_version, no_cxx
from oobleckd.host.mounts import MOUNTS, Unfit, mount_of
from oobleckd.protocol.gpus import GpuCode
from oobleckd.words import size

Level = Literal["ok", "warn", "fail"]
Code = Literal[
    "", "wrong-version", "missing-package", "few-files", "few-tasks", "little-locked", "clock-behind",
    "clock-not-kept", "not-writable", "little-room", "no-room", "path-too-long", GpuCode, "torch-fails",
    "torch-sees-none", "no-kernels", "network-file-system", "unknown-file-system", "memory-file-system",
    "container-file-system", "invalid-settings", "no-daemon", "no-answer", "other-version",
    "journal-not-writable", "records-lost", "no-keys", "no-node-keys", "keys-open", "keys-unlike",
    "keys-invalid", "not-checked", "not-usable", "none-usable", "unlike-devices", "unlike-kinds",
    "no-compiler",
]  # fmt: skip
"""What was found, for programs; "" where there is no more to it than the level."""

_OURS = "oobleckd"
_LOW_DISK_BYTES, _FULL_DISK_BYTES = 10 << 30, 1 << 30
_MAX_SOCKET_PATH = 107
_STA_UNSYNC = 0x40
_TIMEX_BYTES = 512  # struct timex, with room to spare
_COMPARE: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge, "<": operator.lt, "==": operator.eq, ">": operator.gt, "<=": operator.le,
}  # fmt: skip


class CheckupItem(msgspec.Struct, frozen=True):
    """What was found about one thing; ``hint`` says what to do where it is not ok. ``about``: the packages,
    files, nodes, devices or kinds of these that it is about.
    """

    name: str
    level: Level
    text: str
    hint: str = ""
    code: Code = ""
    about: tuple[str, ...] = ()


# --------------------------------------------------------------------------- versions


def python(version: str = sys.version.split()[0], wanted: str = "") -> CheckupItem:
    """The interpreter that runs us against the range that the package asks for."""
    wanted = wanted or metadata.metadata(_OURS)["Requires-Python"] or ""
    if within(version, wanted):
        return CheckupItem("python", "ok", f"{version} (wanted: {wanted})")
    return CheckupItem(
        "python", "fail", f"{version}, wanted is {wanted}", "make the environment anew with another Python",
        "wrong-version", (version,),
    )  # fmt: skip


def packages(requires: Iterable[str] | None = None) -> list[CheckupItem]:
    """What the package depends on, against the ranges that it asks for. Those that fit are one line."""
    checks, fitting = [], []
    for requirement in requires if requires is not None else metadata.requires(_OURS) or ():
        name, wanted = _parsed(requirement)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            hint = f"pip install '{name}{wanted}'"
            checks.append(
                CheckupItem("packages", "fail", f"{name} is missing", hint, "missing-package", (name,))
            )
            continue
        if within(version, wanted):
            fitting.append(f"{name} {version}")
        else:
            text = f"{name} {version}, wanted is {wanted}"
            hint = f"pip install '{name}{wanted}'"
            checks.append(CheckupItem("packages", "fail", text, hint, "wrong-version", (name,)))
    return checks or [CheckupItem("packages", "ok", ", ".join(fitting))]


def within(version: str, wanted: str) -> bool:
    """Whether ``version`` lies in a range such as ">=2.11,<3". Only its leading numbers count."""
    for clause in filter(None, wanted.replace(" ", "").split(",")):
        found = re.fullmatch(r"(>=|<=|==|<|>)([0-9.]+)", clause)
        if found and not _COMPARE[found[1]](_numbers(version), _numbers(found[2])):
            return False
    return True


def _parsed(requirement: str) -> tuple[str, str]:
    found = re.match(r"([A-Za-z0-9._-]+)\s*\(?([^;)]*)", requirement)
    assert found is not None, requirement
    return found[1], found[2].strip()


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def compiler(why: Callable[[], str] = no_cxx, version: Callable[[], str] = cxx_version) -> CheckupItem:
    """What jobs with ``train.compile`` are compiled with; all others need none."""
    if missing := why():
        text = f"{missing}: jobs with train.compile are refused"
        return CheckupItem("compiler", "ok", text, INSTALL, "no-compiler")
    return CheckupItem("compiler", "ok", version())


# --------------------------------------------------------------------------- limits of this machine


def clock(
    now: float | None = None, installed_at: float | None = None, synchronized: bool | None = None
) -> CheckupItem:
    """Whether the wall clock can be right: later than this installation, and kept in step by somebody."""
    now = time.time() if now is None else now
    installed_at = Path(__file__).stat().st_mtime if installed_at is None else installed_at
    if now < installed_at:
        return CheckupItem(
            "clock", "fail", "it is earlier than this installation", "set the clock, by NTP best of all",
            "clock-behind",
        )  # fmt: skip
    if not (_is_synchronized() if synchronized is None else synchronized):
        hint = "switch on NTP (timedatectl set-ntp true), or times of different machines cannot be compared"
        return CheckupItem("clock", "warn", "nobody keeps it in step with others", hint, "clock-not-kept")
    return CheckupItem("clock", "ok", "kept in step with others")


def _is_synchronized() -> bool:
    """The kernel's own word (adjtimex), which every NTP client sets."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)
    ctypes.CDLL(None).adjtimex(timex)
    status_at = ctypes.sizeof(ctypes.c_long) * 5  # modes (padded), offset, freq, maxerror, esterror
    return not ctypes.c_int.from_buffer(timex, status_at).value & _STA_UNSYNC


def socket_folder(socket: Path) -> CheckupItem:
    """Whether a socket can be where the daemon's is looked for."""
    if len(str(socket)) > _MAX_SOCKET_PATH:
        text = f"{socket} is longer than the {_MAX_SOCKET_PATH} characters of a socket's path"
        hint = "choose a shorter one with --socket or OOBLECK_SOCKET"
        return CheckupItem("socket", "fail", text, hint, "path-too-long", (str(socket),))
    return CheckupItem("socket", "ok", str(socket))


def disk(folder: Path, what: str) -> CheckupItem:
    """Room in ``folder``, or where it would be made."""
    there = next(path for path in (folder, *folder.parents) if _is_folder(path))
    free = shutil.disk_usage(there).free
    text = f"{size(free)} free for {what} in {folder}"
    if free < _FULL_DISK_BYTES:
        return CheckupItem(
            "disk", "fail", text, "make room: a daemon that cannot write its journal takes no new work",
            "no-room", (str(folder),),
        )  # fmt: skip
    if free < _LOW_DISK_BYTES:
        return CheckupItem(
            "disk",
            "warn",
            text,
            "a checkpoint needs the model's weights and twice as much of optimizer state",
            "little-room",
            (str(folder),),
        )
    return CheckupItem("disk", "ok", text)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except PermissionError:  # below a folder that is closed to us
        return False


_UNFIT: dict[Unfit, tuple[str, Code]] = {
    "network": ("its write-ahead log and its locks may not hold there", "network-file-system"),
    "unknown": ("nobody knows whether write-ahead log and locks hold there", "unknown-file-system"),
    "memory": ("what lies there is gone when the machine restarts", "memory-file-system"),
    "container": ("what lies there is gone with the container", "container-file-system"),
}


def state_folder(folder: Path, mounts: Path = MOUNTS) -> CheckupItem:
    """Whether the daemon's journal may lie in ``folder``, or where that would be made."""
    mount = mount_of(folder, mounts)
    text = f"{folder} is on {mount.kind or 'an unknown file system'}"
    if not mount.unfit:
        return CheckupItem("state folder", "ok", text)
    why, code = _UNFIT[mount.unfit]
    level: Level = "fail" if mount.unfit == "network" else "warn"
    hint = "a local disk, Lustre or GPFS will do: --state (OOBLECK_STATE) of `up`, --state-dir of oobleckd"
    text = f"{text} ({mount.point}): {why}"
    return CheckupItem("state folder", level, text, hint, code, (str(folder), mount.kind))
