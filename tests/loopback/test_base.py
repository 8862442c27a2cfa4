"""The base of a local cluster, and what a kill of it, of a forker and of a spare does to devices: nothing."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.ctl import processes
from tests.helpers.cluster import Cluster
from tests.helpers.family import members

NODES, KILLS = 2, 6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, NODES, spare=True) as running:
        yield running


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


def forker_of(agent: int) -> int | None:
    """None while there is none."""
    for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text(encoding="ascii").split():
        if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").startswith("oobleck-forker"):
            return int(pid)
    return None


def base_of(cluster: Cluster) -> int:
    base = cluster.home.base.process()
    assert base is not None
    return base.pid


def devices(cluster: Cluster) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The life of each node, and its device processes."""
    return {node.name: (node.incarnation, node.pids) for node in cluster.client.nodes()}


def test_devices_outlive_whoever_forked_them(cluster: Cluster) -> None:
    rng = random.Random(39)
    agents = {node: process.pid for node, process in cluster.home.alive().items() if node.startswith("node-")}
    assert {parent_of(agent) for agent in agents.values()} == {base_of(cluster)}
    before, family = devices(cluster), members(cluster.state)

    def spares() -> list[int] | None:
        found = [node.spare_pid for node in cluster.client.nodes() if node.spare == "ready"]
        return found if len(found) == NODES else None

    for kill in range(KILLS):
        agent = rng.choice(sorted(agents.values()))
        whom = ("spare", "forker", "base")[kill % 3]
        if whom == "spare":
            victim = rng.choice(cluster.until(spares, "a spare for each node"))
        elif whom == "forker":
            victim = cluster.until(lambda agent=agent: forker_of(agent), "a forker")
        elif cluster.home.base.process() is not None:
            victim = base_of(cluster)
        else:
            continue
        handle = os.pidfd_open(victim)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.close(handle)
    cluster.until(spares, "a spare for each node")
    assert devices(cluster) == before
    assert {node: process.pid for node, process in cluster.home.alive().items() if node in agents} == agents

    # An agent that dies takes its own along and nobody else's; another one has a base again.
    cluster.kill("node-1", "agent-only")
    cluster.ctl("start-node", "node-1")
    after = devices(cluster)
    assert after["node-2"] == before["node-2"]
    assert after["node-1"] != before["node-1"]
    assert parent_of(cluster.home.alive()["node-1"].pid) == base_of(cluster)

    # What the base cannot give it gets by exec.
    cluster.kill("node-1", "agent-only")
    cluster.env["MKL_VERBOSE"] = "0"
    said = cluster.ctl("start-node", "node-1", "-o", "json")
    assert "node-1 is started by exec: the base was started with another standing: environment" in said.stderr
    assert parent_of(json.loads(said.stdout)["pid"]) != base_of(cluster)

    family |= members(cluster.state)
    assert len(family) >= 1 + 1 + NODES * 4  # daemon, base; an agent, a forker, a device and a spare each
    cluster.ctl("down")
    assert not processes.outlive(family, 10.0)
