"""The units under a booted systemd: they start, train, survive a restart and a kill of the daemon, and go.

The tests share one set of services and are one story; the last one takes them down.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.helpers.cluster import tiny_job
from tests.helpers.unitcluster import UnitCluster
from tests.host.conftest import NODES

DAEMON = "oobleckd.service"
WORKERS = [f"oobleck-worker@{node}.service" for node in NODES]
MOST_EXPOSED = 2.0


def test_units_are_clean(services: UnitCluster) -> None:
    units = [DAEMON, WORKERS[0], "oobleck-workers.target"]
    assert services.box.run("systemd-analyze", "verify", *units).stderr == ""


@pytest.mark.parametrize("unit", [DAEMON, WORKERS[0]])
def test_units_are_closed(services: UnitCluster, unit: str) -> None:
    said = services.box.run("systemd-analyze", "security", "--no-pager", unit).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert found, said
    assert float(found[1]) <= MOST_EXPOSED, said


def test_nothing_runs_as_root(services: UnitCluster) -> None:
    for pids in services.pids().values():
        for pid in pids:
            assert services.box.run("ps", "-o", "user=", "-p", str(pid)).stdout.strip() == "oobleck"


def test_the_daemon_comes_and_goes_and_training_does_not_notice(services: UnitCluster) -> None:
    job = services.client.submit(tiny_job("units", train={"steps": 120, "global_batch": 6})).id
    services.at_step(job, 4)
    workers, daemon = services.pids(), services.property(DAEMON, "MainPID")
    assert "units-1 running" in services.property(DAEMON, "StatusText")

    services.systemctl("restart", DAEMON)
    restarted = services.property(DAEMON, "MainPID")
    assert restarted != daemon
    services.usable(len(NODES))
    assert services.pids() == workers

    before = services.client.job(job).step
    assert before < 120, "the restart came too late to show anything"
    services.at_step(job, before + 1)
    services.box.run("kill", "-KILL", restarted)
    killed = services.until(lambda: _other(services, restarted), "systemd starts the daemon again")
    assert killed not in {"0", restarted}
    assert services.property(DAEMON, "NRestarts") == "1"

    view = services.job_in(job, "done")
    assert (view.step, view.incidents, services.client.incidents()) == (120, 0, ())
    assert services.pids() == workers
    assert "bit-identical" in services.verify(job)


def _other(services: UnitCluster, pid: str) -> str | None:
    """The daemon's pid once it is another one than ``pid`` and ready."""
    found = services.property(DAEMON, "MainPID")
    return found if found not in {"0", pid} and services.unit_state(DAEMON) == "active" else None


def test_the_watchdog_hears_the_daemon(services: UnitCluster) -> None:
    assert services.property(DAEMON, "WatchdogUSec") == "30s"
    assert services.property(DAEMON, "WatchdogTimestampMonotonic") != "0"


def test_installing_again_changes_nothing(services: UnitCluster) -> None:
    before = services.property(DAEMON, "MainPID")
    found = json.loads(services.ctl("install-systemd", "-o", "json").stdout)
    assert {file["state"] for file in found["files"]} == {"same"}
    assert services.property(DAEMON, "MainPID") == before


def test_a_daemon_that_cannot_be_configured_is_not_tried_again(services: UnitCluster) -> None:
    services.box.path("/etc/oobleck/config.toml").write_text("[daemon]\nbeats_s = 1\n")
    services.systemctl("restart", DAEMON, check=False)
    assert services.unit_state(DAEMON) == "failed"
    assert "hint: did you mean 'beat_s'?" in services.journal(DAEMON)
    services.box.path("/etc/oobleck/config.toml").unlink()
    services.systemctl("start", DAEMON)
    services.usable(len(NODES))
    assert {services.unit_state(unit) for unit in WORKERS} == {"active"}


def test_a_device_ends_with_its_agent(services: UnitCluster) -> None:
    agent, *devices = services.pids()["node-1"]
    services.box.run("kill", "-KILL", str(agent))
    services.until(lambda: _gone(services, agent, *devices), "the device ends")
    services.until(
        lambda: services.unit_state(WORKERS[0]) == "active" or None, "systemd starts the agent again"
    )


def test_stopping_the_target_ends_all_workers(services: UnitCluster) -> None:
    services.usable(len(NODES))
    pids = [pid for node in services.pids().values() for pid in node]
    services.systemctl("stop", "oobleck-workers.target")
    assert {services.unit_state(unit) for unit in WORKERS} == {"inactive"}
    assert _gone(services, *pids)
    assert services.unit_state(DAEMON) == "active"


def test_uninstalling_leaves_the_state(services: UnitCluster) -> None:
    services.systemctl("enable", WORKERS[0])
    said = services.ctl("install-systemd", "--uninstall")
    assert "left as it is: /var/lib/oobleck" in said.stderr
    assert services.systemctl("list-unit-files", "oobleck*", "--no-legend", check=False) == ""
    assert services.property(DAEMON, "LoadState") == "not-found"
    assert not list(services.box.path("/etc/systemd/system").rglob("oobleck*"))
    assert services.box.path("/var/lib/oobleck/journal.sqlite").exists()
    assert "nothing is installed" in services.ctl("install-systemd", "--uninstall").stderr


def _gone(services: UnitCluster, *pids: int) -> bool | None:
    """True once none of ``pids`` runs in the box (for ``until``: None while one does)."""
    found = services.box.run("ps", "-o", "stat=", "-p", ",".join(map(str, pids)), check=False).stdout.split()
    return all(stat.startswith("Z") for stat in found) or None
