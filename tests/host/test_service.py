"""The units under a booted systemd: they start, train, survive restarts, kills and hangs of the daemon, and
go.

The tests share one set of services and are one story; the last one takes them down.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator

import pytest

from oobleckd.client import Client
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.unixhttp import ApiProblem, Unreachable
from tests.helpers.cluster import tiny_job
from tests.helpers.unitcluster import UnitCluster
from tests.host.conftest import NODES

DAEMON = "oobleckd.service"
SOCKET = "oobleckd.socket"
WORKERS = [f"oobleck-worker@{node}.service" for node in NODES]
MAX_EXPOSED = 2.0
RESTARTS, HANGS = 4, 2
STEPS, SLOW = 60, 12
"""For as long as those take, and half as long again: whoever trains sleeps most of the time, so that this
costs no more than it has to. The same for all jobs: one run without failures serves all.
"""
FEW, SLOW_S = 24, 3.0
"""Steps where one thing happens, and for how long they are slow."""
WATCHDOG_S = 3
LOG_LINES = 5000


def test_units_are_clean(services: UnitCluster) -> None:
    units = [SOCKET, DAEMON, WORKERS[0], "oobleck-workers.target"]
    assert services.box.run("systemd-analyze", "verify", *units).stderr == ""


@pytest.mark.parametrize("unit", [DAEMON, "oobleck-worker@.service"])
def test_units_are_closed(services: UnitCluster, unit: str) -> None:
    command = ["systemd-analyze", "security", "--offline=yes", "--no-pager", f"/etc/systemd/system/{unit}"]
    said = services.box.run(*command).stdout
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", said)
    assert found, said
    assert float(found[1]) <= MAX_EXPOSED, said


def test_nothing_runs_as_root(services: UnitCluster) -> None:
    for pids in services.pids().values():
        for pid in pids:
            assert services.box.run("ps", "-o", "user=", "-p", str(pid)).stdout.strip() == "oobleck"


_ACTS_EVERY = 6
"""Questions: some eight acts a second, of twenty that the daemon takes of anybody."""


class Asker(threading.Thread):
    """Asks again and again, to read and to act, and keeps what got no answer."""

    def __init__(self, services: UnitCluster) -> None:
        super().__init__(daemon=True)
        # Answered, however long a daemon takes to start on a machine that does much else.
        self._client = Client(services.client.socket_path, timeout_s=120.0)
        self._enough = threading.Event()
        self.answered = 0
        self.unanswered: list[str] = []

    def run(self) -> None:
        for number in itertools.count():
            if self._enough.wait(0.02):
                return
            self._ask(self._client.status)
            if number % _ACTS_EVERY == 0:
                self._ask(lambda: self._client.drain("nobody"))

    def _ask(self, question: Callable[[], object]) -> None:
        try:
            question()
        except Unreachable as error:
            self.unanswered.append(error.problem)
            return
        except ApiProblem as error:
            if error.status != 404:  # that there is no such node is an answer
                self.unanswered.append(error.problem)
        self.answered += 1

    def end(self) -> None:
        self._enough.set()
        self.join(30)


@pytest.fixture
def impatient(services: UnitCluster) -> Iterator[UnitCluster]:
    """Services whose daemon is expected to give a sign of life within three seconds."""
    services.drop_in(DAEMON, f"[Service]\nWatchdogSec={WATCHDOG_S}\nTimeoutAbortSec=1\n")
    services.systemctl("restart", DAEMON)
    services.usable(len(NODES))
    yield services
    conf = services.box.path(f"/etc/systemd/system/{DAEMON}.d/test.conf")
    conf.unlink()
    conf.parent.rmdir()
    services.systemctl("daemon-reload")


def trains_on(services: UnitCluster, name: str, act: Callable[[str], None], times: int) -> None:
    """``act`` upon the daemon (its pid) again and again while a job is trained: nothing of that shows in
    workers or results.
    """
    job = services.client.submit(tiny_job(name, train={"steps": STEPS, "global_batch": 6})).id
    services.at_step(job, 4)
    services.slow_down(NODES, SLOW)
    workers, before = services.pids(), len(services.client.incidents())
    status = f"{job} running"  # told every few seconds
    services.until(lambda: status in services.property(DAEMON, "StatusText") or None, status)
    for _ in range(times):
        services.systemctl(
            "reset-failed", DAEMON
        )  # ten starts in a minute are the limit, and here they are meant
        daemon = services.property(DAEMON, "MainPID")
        act(daemon)
        services.until(lambda: _other(services, daemon), "another daemon")  # noqa: B023
        services.usable(len(NODES))
        assert services.pids() == workers
        step = services.client.job(job).step
        assert step < STEPS, f"{name} was too short to show anything"
        services.at_step(job, step + 1)
    services.hurry(NODES)
    view = services.job_in(job, "done", timeout_s=400.0)
    assert (view.step, view.incidents, len(services.client.incidents())) == (STEPS, 0, before)
    assert services.pids() == workers
    assert "bit-identical" in services.verify(job)


def test_restarts_do_not_disturb_training_and_no_request_is_lost(services: UnitCluster) -> None:
    asker = Asker(services)
    asker.start()
    try:
        trains_on(services, "restarted", lambda _: services.systemctl("restart", DAEMON) and None, RESTARTS)
    finally:
        asker.end()
    assert asker.unanswered == []
    assert asker.answered > 10 * RESTARTS


def test_kills_do_not_disturb_training(services: UnitCluster) -> None:
    def kill(daemon: str) -> None:
        services.box.run("kill", "-KILL", daemon)

    trains_on(services, "killed", kill, RESTARTS)


def test_a_daemon_that_hangs_is_replaced_and_training_is_not_disturbed(impatient: UnitCluster) -> None:
    def stop(daemon: str) -> None:
        impatient.box.run("kill", "-STOP", daemon)

    trains_on(impatient, "hung", stop, HANGS)
    assert "Watchdog timeout" in impatient.journal(DAEMON, LOG_LINES)


def test_a_daemon_that_is_aborted_says_where_it_stood(services: UnitCluster) -> None:
    daemon = services.property(DAEMON, "MainPID")
    services.box.run("kill", "-ABRT", daemon)
    services.until(lambda: _other(services, daemon), "another daemon")
    assert "Fatal Python error: Aborted" in services.journal(DAEMON, LOG_LINES)
    services.usable(len(NODES))


def test_who_asks_a_daemon_that_is_stopped_starts_it(services: UnitCluster) -> None:
    services.systemctl("stop", DAEMON)
    assert services.unit_state(DAEMON) == "inactive"
    assert services.client.status().line
    assert services.unit_state(DAEMON) == "active"
    services.usable(len(NODES))


def test_stopping_a_worker_costs_no_work(services: UnitCluster) -> None:
    job = services.client.submit(tiny_job("stopped", train={"steps": FEW, "global_batch": 6})).id
    services.at_step(job, 4)
    services.slow_down(NODES, SLOW, SLOW_S)
    before = len(services.client.incidents())
    services.systemctl("stop", WORKERS[1])
    (left,) = [node for node in services.client.nodes() if node.name == NODES[1]]
    assert (left.state, left.cause) == ("left", "left")
    assert NODES[1] not in services.client.job(job).nodes
    services.systemctl("start", WORKERS[1])
    view = services.job_in(job, "done")
    assert (view.incidents, len(services.client.incidents())) == (0, before)
    assert "bit-identical" in services.verify(job)
    services.usable(len(NODES))


def test_the_journal_tells_the_story_of_an_incident(services: UnitCluster) -> None:
    job = services.client.submit(tiny_job("story", train={"steps": FEW, "global_batch": 6})).id
    victim = services.at_step(job, 4).nodes[0]
    services.slow_down(NODES, SLOW, SLOW_S)
    before = {incident.id for incident in services.client.incidents()}
    services.box.run("kill", "-KILL", str(services.pids()[victim][0]))

    def closed() -> IncidentView | None:
        return next((i for i in services.client.incidents() if i.id not in before and not i.open), None)

    incident = services.until(closed, "the incident is over")
    said = services.box.run(
        "journalctl", "--no-pager", "--output", "json", f"OOBLECK_INCIDENT={incident.id}"
    ).stdout.splitlines()
    entries = [json.loads(line) for line in said]
    assert incident.id in entries[0]["MESSAGE"]
    assert victim in entries[0]["MESSAGE"]
    assert "recovered in" in entries[-1]["MESSAGE"]
    assert {entry["_SYSTEMD_UNIT"] for entry in entries} == {DAEMON}
    assert {entry["OOBLECK_JOB"] for entry in entries} == {job}
    of_agent = services.box.run(
        "journalctl", "--no-pager", "-o", "cat", f"OOBLECK_NODE={victim}", "-u", "oobleck-worker@*"
    )
    assert "connected to the daemon" in of_agent.stdout
    services.job_in(job, "done")
    assert "bit-identical" in services.verify(job)
    services.usable(len(NODES))


def test_workers_say_what_they_do(services: UnitCluster) -> None:
    def idle() -> bool | None:
        """It is told now and then, and may still have the job of the test before."""
        said = services.property(WORKERS[0], "StatusText")
        return said.startswith("1 of 1 device up, no job, daemon tcp://") or None

    services.until(idle, "the worker says that it has no job")
    assert services.property(WORKERS[0], "WatchdogUSec") == "1min"


def test_idle_workers_heartbeat_by_udp(services: UnitCluster) -> None:
    """The units let them."""
    before = services.client.debug().counters["datagram_heartbeats"]

    def beaten() -> bool | None:
        return services.client.debug().counters["datagram_heartbeats"] >= before + 20 * len(NODES) or None

    services.until(beaten, "heartbeats come by UDP")


def test_a_dump_has_logs_and_stacks(services: UnitCluster) -> None:
    services.ctl("debug", "dump", "-o", "/run/dump.tar.gz")
    names = services.box.run("tar", "--list", "--file", "/run/dump.tar.gz").stdout
    for name in ("daemon.json", "logs/journal.export", "metrics.txt", "nodes.json"):
        assert name in names


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
    services.box.path("/etc/oobleck/config.toml").write_text("[daemon]\nheartbeats_s = 1\n")
    services.systemctl("restart", DAEMON, check=False)
    assert services.unit_state(DAEMON) == "failed"
    assert "hint: did you mean 'heartbeat_s'?" in services.journal(DAEMON)
    services.box.path("/etc/oobleck/config.toml").unlink()
    services.systemctl("reset-failed", DAEMON, SOCKET)
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


def test_devices_of_a_stage_read_each_others_memory(services: UnitCluster) -> None:
    """As the user of the units, who sees no process of anybody else's."""
    two, rest = WORKERS[:2], WORKERS[2:]
    services.systemctl("stop", *rest)
    for unit in two:
        services.drop_in(unit, "[Service]\nEnvironment=OOBLECK_DEVICES=2\n")
    services.systemctl("restart", *two)
    services.until(
        lambda: (
            [len(node.pids) for node in services.client.nodes() if node.state == "standby"] == [2, 2] or None
        ),
        "two devices in each of two nodes",
    )
    resources = {"devices_per_stage": 2, "device_memory": "64MiB"}
    job = services.client.submit(tiny_job("together", resources=resources)).id
    done = services.job_in(job, "done")
    assert done.state == "done"
    services.no_drop_in(*two)


def test_stopping_the_target_ends_all_workers(services: UnitCluster) -> None:
    """Two are there, with two devices each."""
    pids = [pid for node in services.pids().values() for pid in node if pid]
    assert len(pids) >= 2 * 3
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
