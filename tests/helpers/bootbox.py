"""This machine's own systemd, booted as process 1 over a throw-away overlay of ``/``.

Owns the namespaces (mount, pid, net, uts, ipc, cgroup), the mounts in them, the boot and the end. Inside, everything of this
machine can be read and anything can be written; nothing of it lasts, and nothing outside is touched. Needs root and the
right to make namespaces. Owns nothing of what is installed inside (``unitcluster``).
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

BOOT_S = 60.0
_END_S = 20.0
_SYSTEMD = Path("/lib/systemd/systemd")
_PROGRAMS = ("unshare", "nsenter", "setpriv", "mount", "pivot_root", "dbus-daemon")
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

# Runs as process 1 of the new namespaces, with the box's folder, the host's name, and then triples of what to bind: mode, target, source.
_INIT = r"""
set -eu
box=$1; hostname "$2"; shift 2
mount -t tmpfs -o size=1g,mode=755 tmpfs "$box"
mkdir "$box/upper" "$box/work" "$box/root"
root=$box/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$box/upper,workdir=$box/work" "$root"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,ro,bind "$root/proc/sys"
[ ! -e "$root/proc/sysrq-trigger" ] || mount --bind /dev/null "$root/proc/sysrq-trigger"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
for device in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod -m 666 "$root/dev/${device%:*}" c 1 "${device#*:}"
done
mknod -m 600 "$root/dev/console" c 1 3
mknod -m 666 "$root/dev/tty" c 5 0
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666,mode=620 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
while [ $# -gt 0 ]; do
  mkdir -p "$root$2"
  mount --bind -o "$1" "$3" "$root$2"
  # A service may pass through to what was bound; the folders are the overlay's, not this machine's.
  above=$(dirname "$2")
  while [ "$above" != / ]; do chmod o+x "$root$above"; above=$(dirname "$above"); done
  shift 3
done
hostname >"$root/etc/hostname"
echo "127.0.0.1 localhost $(hostname)" >"$root/etc/hosts"
: >"$root/etc/machine-id"
: >"$root/etc/fstab"
units=$root/etc/systemd/system
rm -rf "$units"
mkdir "$units"
for unit in getty.target systemd-logind.service systemd-timesyncd.service apt-daily.timer apt-daily-upgrade.timer \
    systemd-sysctl.service dev-hugepages.mount systemd-firstboot.service proc-sys-fs-binfmt_misc.automount; do
  ln -s /dev/null "$units/$unit"
done
cd "$root"
mkdir -p .outside
pivot_root . .outside
umount -l /.outside
# As a real boot has it: systemd mounts credentials in a namespace of its own, from where they come to all others.
mount --make-rshared /
exec env -i container=oobleck-test PATH=/usr/sbin:/usr/bin /lib/systemd/systemd --unit=multi-user.target
"""


def why_not() -> str:
    """Why no box can be booted here; "" when one can."""
    if os.geteuid() != 0:
        return "this needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    missing += [] if _SYSTEMD.exists() else ["systemd"]
    if missing:
        return f"missing on this machine: {', '.join(missing)} (packages systemd, dbus, util-linux)"
    if _cgroups() is None:
        return "no cgroup2 file system is mounted"
    tried = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--net", "--cgroup", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"namespaces are forbidden here: {tried.stderr.strip()}" if tried.returncode else ""


class BootBox:
    """A booted system. ``binds``: folders of this machine to be seen inside, by where (read only); ``shares``: the same, to be written to."""

    def __init__(
        self,
        folder: Path,
        binds: Mapping[str, Path],
        *,
        name: str = "box",
        shares: Mapping[str, Path] | None = None,
    ) -> None:
        self.name = name
        self._folder = folder
        self._binds = [
            (mode, at, of)
            for mode, found in (("ro", binds), ("rw", shares or {}))
            for at, of in found.items()
        ]
        self._log = folder / "boot.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        cgroups = _cgroups()
        assert cgroups is not None
        self._cgroup = cgroups / f"oobleck-test-{secrets.token_hex(4)}"

    def __enter__(self) -> Self:
        try:
            self._boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Process 1 of the box, by its number out here."""
        return self._pid

    def cut_power(self) -> None:
        """The end of everything in it, at once."""
        self._end()

    def path(self, inside: str) -> Path:
        """A file of the box, as this process can open it."""
        return Path(f"/proc/{self._pid}/root{inside}")

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root; with ``check`` a failure shows what it printed."""
        # In a cgroup of the box: systemctl and systemd must be able to name where a caller is.
        enter = 'echo $$ >"$0/cgroup.procs"; exec nsenter --target "$1" --all -- env -i "PATH=$2" "${@:3}"'
        scope = self._cgroup / "caller.scope"
        scope.mkdir(exist_ok=True)
        done = subprocess.run(
            ["bash", "-c", enter, str(scope), str(self._pid), _PATH, *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    # ------------------------------------------------------------------ below

    def _boot(self) -> None:
        root = self._folder / "box"
        root.mkdir()
        self._cgroup.mkdir()
        start = (
            'echo $$ >"$0/cgroup.procs"; exec setpriv --pdeathsig KILL unshare --mount --propagation private '
            '--pid --fork --kill-child --uts --ipc --net --cgroup bash -c "$@"'
        )
        binds = [str(word) for bind in self._binds for word in bind]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", start, str(self._cgroup), _INIT, "init", str(root), self.name, *binds],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._await_boot(time.monotonic() + BOOT_S)

    def _await_boot(self, deadline: float) -> None:
        """Asked again and again: nothing of the box can call out to here."""
        assert self._process is not None
        pause = threading.Event()
        while time.monotonic() < deadline:
            assert self._process.poll() is None, f"the box ended: {self._log.read_text()}"
            self._pid = self._pid or self._find_init()
            if self._pid and self.run("systemctl", "is-system-running", check=False).stdout.strip() in {
                "running",
                "degraded",
            }:
                return
            pause.wait(0.1)
        raise AssertionError(f"the box did not boot within {BOOT_S} s: {self._log.read_text()}")

    def _find_init(self) -> int:
        """Process 1 of the box by its number out here: the child of unshare, once that is what runs."""
        assert self._process is not None
        pid = self._process.pid
        if Path(f"/proc/{pid}/comm").read_text().strip() != "unshare":
            return 0
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        is_booted = children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "systemd"
        return int(children[0]) if is_booted else 0

    def _end(self) -> None:
        """As if its power were cut: unshare ends process 1, and with that everything in it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._cgroup.exists():
            self._remove_cgroup(time.monotonic() + _END_S)

    def _remove_cgroup(self, deadline: float) -> None:
        """Callers from out here may be on their way out still: their cgroup says when it is empty."""
        if (kill := self._cgroup / "cgroup.kill").exists():  # Linux 5.14
            kill.write_text("1")
        pause = threading.Event()
        while "populated 1" in (self._cgroup / "cgroup.events").read_text() and time.monotonic() < deadline:
            pause.wait(0.05)
        folders = [path for path in self._cgroup.rglob("*") if path.is_dir()]
        for folder in (*sorted(folders, reverse=True), self._cgroup):  # what lies in a folder sorts behind it
            folder.rmdir()


def _cgroups() -> Path | None:
    """Where cgroup2 is mounted."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return next((Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"), None)
