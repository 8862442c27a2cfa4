"""How large the cluster is that a machine is looked at for."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from oobleckd.ctl.clustersize import measure, of_nodes
from oobleckd.ctl.local import Cluster, Home
from oobleckd.host.needs import ClusterSize
from tests.helpers.api_server import node_view

HERE = f"{socket.gethostname()}-0123abcd-1"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("OOBLECK_STATE", str(tmp_path))
    return Home(tmp_path)


def test_of_nodes_that_are_there() -> None:
    two = ("node-1/0", "node-1/1")
    nodes = [node_view("node-1", host=HERE, devices=two), node_view("far", host="b", kinds=("cuda",))]
    assert of_nodes(nodes, "cpu") == ClusterSize(2, 2 + len(nodes[1].devices), 1, 2, "cuda")


def test_of_the_local_cluster_that_was_started_last(home: Home) -> None:
    home.save(Cluster(("a", "b", "c"), 2, "tcp://127.0.0.1:1", allow_injection=True))
    assert measure(None, [], "cpu", 1) == (ClusterSize(3, 6, 3, 6), False)
    (home.state / "cluster.json").write_text("{")
    assert measure(None, [], "cpu", 1) == (ClusterSize(), False)


def test_of_nodes_with_keys(home: Home) -> None:
    for name in ("a", "b"):
        (home.keys / "nodes").mkdir(parents=True, exist_ok=True)
        (home.keys / "nodes" / f"{name}.key_secret").touch()
    assert measure(None, [home.keys], "cuda", 8) == (ClusterSize(2, 16, 1, 8, "cuda"), False)
