"""A training cluster whose letters go by groups: a node dies in the middle of a step, and it shows in no bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.cluster import Cluster
from tests.helpers.matrix import Cell, run_cell

NODES = 4


def test_a_kill_on_the_gloo_road_does_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOBLECK_ROAD", "gloo")
    with Cluster(tmp_path, NODES) as cluster:
        run_cell(cluster, Cell("backward", "middle", 1))
        logs = "\n".join(file.read_text() for file in cluster.home.logs.glob("node-*.log"))
    opened = {int(epoch) for epoch in re.findall(r"lane \S+ > \S+ is open in epoch (\d+)", logs)}
    over = {int(epoch) for epoch in re.findall(r"group of epoch (\d+) is over: without", logs)}
    assert over, "the loss ended no group"
    assert min(over) in opened, "the group that ended had not carried letters"
    assert max(opened) > max(over), "no new group was used after the loss"
    assert "gloo groups, for a test" in logs
