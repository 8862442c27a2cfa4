"""A cluster of services: daemon and workers as units of a booted systemd, installed by ``install-systemd``.

Owns an installation in a ``BootBox`` (a virtual environment in /opt/oobleck with this checkout's code) and
how its units are asked for their state. What is waited for is ``Cluster``'s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from oobleckd.client import Client
from tests.helpers.bootbox import BootBox
from tests.helpers.cluster import Cluster

CHECKOUT = Path(__file__).parents[2]
HOME = "/opt/oobleck"
_BINDS = {
    "/opt/checkout": CHECKOUT,
    "/opt/packages": Path(sysconfig.get_path("purelib")),
    sys.base_prefix: Path(sys.base_prefix),
}

# As pip writes it. The planner's processes import the daemon's script, which must not start a daemon then.
_SCRIPT = f"""#!{HOME}/bin/python3
import sys
from {{module}} import {{function}}
if __name__ == "__main__":
    sys.exit({{function}}())
"""


class UnitCluster(Cluster):
    """The services of a box, which are there once ``install-systemd`` has been run in it."""

    def __init__(self, box: BootBox, nodes: int) -> None:
        super().__init__(box.path("/var/lib/oobleck"), nodes)
        self.box = box
        self.client = Client(box.path("/run/oobleck/oobleckd.sock"))

    def configure(self, text: str) -> None:
        """Write /etc/oobleck/config.toml."""
        self.box.run("mkdir", "-p", "/etc/oobleck")
        self.box.path("/etc/oobleck/config.toml").write_text(text)

    def drop_in(self, unit: str, text: str) -> None:
        """Change a unit, as ``systemctl edit`` does."""
        folder = f"/etc/systemd/system/{unit}.d"
        self.box.run("mkdir", "-p", folder)
        self.box.path(f"{folder}/test.conf").write_text(text)
        self.systemctl("daemon-reload")

    def no_drop_in(self, *units: str) -> None:
        """Take back what :meth:`drop_in` changed; the units want a restart."""
        self.box.run("rm", "-r", *(f"/etc/systemd/system/{unit}.d" for unit in units))
        self.systemctl("daemon-reload")

    def ctl(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run oobleckctl in the box, as root."""
        return self.box.run("env", "OMP_NUM_THREADS=1", f"{HOME}/bin/oobleckctl", *args, check=check)

    def verify(self, job: str) -> str:
        """As ``Cluster`` does, by the program in the box, whose files are there."""
        return self.ctl("verify", job, "--single").stdout

    def systemctl(self, *args: str, check: bool = True) -> str:
        """Run systemctl in the box; what it printed."""
        return self.box.run("systemctl", *args, check=check).stdout.strip()

    def property(self, unit: str, name: str) -> str:
        """A property of a unit, as ``systemctl show`` prints it."""
        return self.systemctl("show", "--value", "--property", name, unit)

    def unit_state(self, unit: str) -> str:
        """active, inactive, failed, …"""
        return self.property(unit, "ActiveState")

    def pids(self) -> dict[str, tuple[int, ...]]:
        """Agent and device processes of each node by their numbers in the box, as systemd and the daemon know
        them.
        """
        return {
            node.name: (int(self.property(f"oobleck-worker@{node.name}", "MainPID")), *node.pids)
            for node in self.client.nodes()
        }

    def journal(self, unit: str, lines: int = 40) -> str:
        """The last lines of a unit's log."""
        return self.box.run(
            "journalctl", "--no-pager", "-n", str(lines), "-o", "cat", "-u", unit, check=False
        ).stdout


@contextmanager
def installation(
    folder: Path,
    *,
    name: str = "box",
    binds: Mapping[str, Path] | None = None,
    shares: Mapping[str, Path] | None = None,
) -> Iterator[BootBox]:
    """A box with oobleckd installed for all users in /opt/oobleck, and no unit of it yet. ``name`` and what
    is bound: as for ``BootBox``.
    """
    with BootBox(folder, {**_BINDS, **(binds or {})}, name=name, shares=shares) as box:
        python = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
        box.run(str(python), "-m", "venv", "--without-pip", HOME)
        purelib = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
        box.path(f"{HOME}/{purelib}/oobleckd.pth").write_text("/opt/checkout\n/opt/packages\n")
        project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
        for command, entry in project["scripts"].items():
            module, function = entry.split(":")
            script = box.path(f"{HOME}/bin/{command}")
            script.write_text(_SCRIPT.format(module=module, function=function))
            script.chmod(0o755)
        if fork := os.environ.get("OOBLECK_FORK"):  # units do not have the environment of the tests
            drop_in = box.path("/etc/systemd/system/service.d/fork.conf")
            drop_in.parent.mkdir(parents=True)
            drop_in.write_text(f"[Service]\nEnvironment=OOBLECK_FORK={fork}\n")
        yield box
