"""Four hosts, each a booted systemd of its own, with a switch between them: what bad networks and a power cut
do to a job.

A host is installed as docs/deploy.md says: keys in its credential store, a settings file, one worker. The
daemon is on the first.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from oobleckd.protocol.jobviews import JobView
from tests.helpers.bootbox import BootBox
from tests.helpers.cluster import tiny_job
from tests.helpers.switch import Switch, Weather
from tests.helpers.unitcluster import UnitCluster, installation

NUM_HOSTS = 4
PARTED_S = 3.0
STEPS, SLOW, SLOW_S = 28, 8, PARTED_S + 2.0
"""For as long as a host is away, and more: whoever trains sleeps most of that time. The same where it can be:
one run without failures serves all.
"""
SHARED = "/shared"
SETTINGS = """
[daemon]
endpoint = "tcp://{daemon}:7077"
allow_injection = true

[worker]
daemon = "tcp://{daemon}:7077"
bind = "{own}"
spare = false
"""


@dataclass
class Hosts:
    """The first has the daemon, whose cluster is ``cluster``."""

    boxes: list[BootBox]
    cluster: UnitCluster
    switch: Switch

    def job(self, name: str, steps: int = STEPS) -> str:
        """Submit a job that all four train, slowly for a while, and wait until it is under way."""
        self.switch.heal()
        self.cluster.usable(NUM_HOSTS)
        spec = tiny_job(
            name, train={"steps": steps, "global_batch": 4}, checkpoint={"dir": f"{SHARED}/{name}"}
        )
        job = self.cluster.client.submit(spec).id
        nodes = self.cluster.at_step(job, 4).nodes
        assert len(nodes) == NUM_HOSTS
        self.cluster.slow_down(nodes, SLOW, SLOW_S)
        return job

    def ends_as_ever(self, job: str) -> JobView:
        """The job is done with every step once, and bit for bit as an undisturbed one."""
        view = self.cluster.job_in(job, "done", timeout_s=400.0)
        assert [step.step for step in self.cluster.client.steps(job)] == list(range(1, view.steps + 1))
        assert view.steps_lost == 0
        assert "bit-identical" in self.cluster.verify(job)
        return view

    def incidents(self, job: str) -> list[str]:
        """What befell it."""
        return [
            f"{found.nodes}: {found.cause}" for found in self.cluster.client.incidents() if found.job == job
        ]


def node(number: int) -> str:
    return f"node-{number}"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder, shared = tmp_path_factory.mktemp("hosts"), tmp_path_factory.mktemp("shared")
    shared.chmod(0o777)
    with ExitStack() as stack:
        boxes = [
            stack.enter_context(installed(folder / str(number), number, shared))
            for number in range(1, NUM_HOSTS + 1)
        ]
        switch = Switch()
        for number, box in enumerate(boxes, 1):
            switch.plug(number, box.pid)
        switch.start()
        stack.callback(switch.close)
        clusters = [UnitCluster(box, NUM_HOSTS) for box in boxes]
        for number, cluster in enumerate(clusters, 1):
            own, daemon = switch.address(number), switch.address(1)
            cluster.configure(SETTINGS.format(own=own, daemon=daemon))
            cluster.ctl("install-systemd", *(["--now"] if number == 1 else []))
        clusters[0].ctl("keygen", *map(node, range(1, NUM_HOSTS + 1)))
        clusters[0].systemctl("reload", "oobleckd")
        for number, cluster in enumerate(clusters, 1):
            carry_keys(clusters[0].box, cluster.box, node(number))
            cluster.systemctl("start", f"oobleck-worker@{node(number)}")
        clusters[0].usable(NUM_HOSTS)
        yield Hosts(boxes, clusters[0], switch)


def installed(folder: Path, number: int, shared: Path):
    folder.mkdir()
    return installation(folder, name=f"host-{number}", shares={SHARED: shared})


def carry_keys(source: BootBox, target: BootBox, name: str) -> None:
    """As the page says: two files into the credential store."""
    keys = source.path("/var/lib/oobleck/keys")
    target.run("install", "-d", "-m", "700", "/etc/credstore")
    for file, credential in (
        (f"nodes/{name}.key_secret", f"oobleck.{name}.key_secret"),
        ("server.key", "oobleck.server.key"),
    ):
        shutil.copyfile(keys / file, target.path(f"/etc/credstore/{credential}"))
        target.path(f"/etc/credstore/{credential}").chmod(0o600)


def test_a_worker_has_its_keys_from_the_credential_store(hosts: Hosts) -> None:
    assert not hosts.boxes[1].path("/var/lib/oobleck/keys/nodes").exists()
    found = hosts.boxes[1].run("ls", "/run/credentials/oobleck-worker@node-2.service").stdout.split()
    assert sorted(found) == ["oobleck.node-2.key_secret", "oobleck.server.key"]
    assert {view.host.partition("-")[0] for view in hosts.cluster.client.nodes()} == {"host"}
    assert len({view.host for view in hosts.cluster.client.nodes()}) == NUM_HOSTS


def test_idle_workers_heartbeat_by_udp_to_the_daemon_s_port(hosts: Hosts) -> None:
    def counters() -> dict[str, int]:
        return hosts.cluster.client.debug().counters

    before = counters()["datagram_heartbeats"]
    hosts.cluster.until(
        lambda: counters()["datagram_heartbeats"] >= before + 20 * NUM_HOSTS or None, "heartbeats come by UDP"
    )
    assert counters()["datagrams_forged"] == counters()["datagrams_replayed"] == 0


def test_connections_that_stand_still_kill_nobody(hosts: Hosts) -> None:
    """Three times as long as the lease of a quiet node: who is silent is asked by UDP. Before any weather has
    taught the leases.
    """
    job = hosts.job("still")
    answers = hosts.cluster.client.debug().counters["datagram_answers"]
    hosts.switch.weather = Weather(tcp=False)
    threading.Event().wait(PARTED_S)
    hosts.switch.heal()
    hosts.ends_as_ever(job)
    assert hosts.incidents(job) == []
    assert hosts.cluster.client.debug().counters["datagram_answers"] > answers


def test_loss_and_delay_kill_nobody(hosts: Hosts) -> None:
    job = hosts.job("lossy", 10)
    hosts.switch.weather = Weather(loss=0.1, delay_s=0.02)
    hosts.ends_as_ever(job)
    assert hosts.incidents(job) == []
    assert hosts.switch.num_lost > 20, "the weather was good"


def test_a_slow_network_kills_nobody(hosts: Hosts) -> None:
    job = hosts.job("slow", 10)
    hosts.switch.weather = Weather(rate_bytes_s=1_000_000.0)
    hosts.ends_as_ever(job)
    assert hosts.incidents(job) == []


@pytest.mark.parametrize("one_way", [False, True])
def test_a_host_that_is_cut_off_for_a_while(hosts: Hosts, one_way: bool) -> None:
    job = hosts.job(f"parted-{'one-way' if one_way else 'both'}")
    hosts.switch.part([4], [1, 2, 3], one_way=one_way)
    threading.Event().wait(PARTED_S)
    hosts.switch.heal()
    hosts.ends_as_ever(job)
    hosts.cluster.usable(NUM_HOSTS)
    # Whoever was given up in the meantime came back as a fresh incarnation, and nothing that it did meanwhile
    # counts.
    assert hosts.cluster.client.story(f"node:{node(4)}"), "the daemon did not notice"


def test_workers_leave_in_order_when_their_host_shuts_down(hosts: Hosts) -> None:
    job = hosts.job("shutdown")
    hosts.boxes[2].run("systemctl", "stop", "oobleck-workers.target")
    (left,) = [view for view in hosts.cluster.client.nodes() if view.name == node(3)]
    assert (left.state, left.cause) == ("left", "left")
    hosts.ends_as_ever(job)
    assert hosts.incidents(job) == []
    hosts.boxes[2].run("systemctl", "start", f"oobleck-worker@{node(3)}")


def test_a_power_cut(hosts: Hosts) -> None:
    """The last one: the host stays off."""
    job = hosts.job("power")
    hosts.boxes[3].cut_power()
    view = hosts.ends_as_ever(job)
    assert view.incidents == 1
    (incident,) = [found for found in hosts.cluster.client.incidents() if found.job == job]
    assert incident.nodes == (node(4),)
