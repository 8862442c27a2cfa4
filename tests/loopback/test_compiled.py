"""A job that compiles, on a real cluster: one node compiles and all others load, a spare takes a dead
device's place, a node without anything of its own joins after a restart of the daemon, and the bits are those
of the run without failures. In ``make test`` the same is tried without a compiler
(tests/unit/worker/test_sharing.py) and in one process (tests/unit/worker/test_compiled.py): each layer that
is compiled takes seconds of a core.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job

_COLD_S = 900.0  # of two cores that compile and do other things besides
_COMPILER = """#!/bin/sh
case "$*" in *" -o "*) echo "$*" >> {log} ;; esac
exec g++ "$@"
"""
"""Writes down what it compiles."""


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """What the compiler of all nodes writes down."""
    program, log = tmp_path / "c++", tmp_path / "compiled"
    program.write_text(_COMPILER.format(log=log))
    program.chmod(0o755)
    log.touch()
    return log


@pytest.fixture
def three(tmp_path: Path, compiled: Path) -> Iterator[Cluster]:
    env = {"CXX": str(compiled.with_name("c++"))}
    with Cluster(tmp_path / "cluster", 3, spare=True, env=env) as running:
        yield running


@pytest.mark.slow
def test_one_node_compiles_and_no_loss_shows(three: Cluster, compiled: Path) -> None:
    train = {"compile": True, "steps": 400}
    job = three.client.submit(tiny_job("compiled", train=train, resources={"device_memory": "32MiB"})).id
    three.at_step(job, 3, timeout_s=_COLD_S)
    made = by_nodes(compiled)
    (maker,) = {node for node, _ in made}  # one compiled, all others loaded what it sent

    def has_loaded() -> str | None:
        return next(
            (line for line in log_of(three, "node-2") if "has loaded 2 kinds of layers" in line), None
        )

    three.until(has_loaded, "a spare that has loaded what it needs", _COLD_S)
    victim = next(node for node in three.client.nodes() if node.name == "node-2")
    before = of_device(three, "node-2")
    os.kill(victim.pids[0], signal.SIGKILL)
    over(three, job, 1)
    assert next(n for n in three.client.nodes() if n.name == "node-2").pids == (victim.spare_pid,)
    assert of_device(three, "node-2") == before  # nothing was left to be compiled, or loaded

    newcomer = "node-3" if maker != "node-3" else "node-1"
    three.kill(newcomer, "sigkill")
    over(three, job, 2)
    three.kill_daemon()
    three.start_daemon()
    shutil.rmtree(three.home.run / newcomer / "compiled")
    three.ctl("start-node", newcomer)
    three.until(lambda: newcomer in three.client.job(job).nodes or None, f"{newcomer} in the plan", _COLD_S)
    assert three.job_in(job, "done", timeout_s=_COLD_S).steps_lost == 0
    assert by_nodes(compiled) == made
    three.verify(job)


def by_nodes(compiled: Path) -> set[tuple[str, str]]:
    """What was compiled, and by which node."""
    found = re.findall(r"/(node-\d+)/compiled/\S*/(\S+)\.cpp", compiled.read_text())
    return {(node, name) for node, name in found}


def log_of(cluster: Cluster, node: str) -> list[str]:
    return (cluster.home.logs / f"{node}.log").read_text().splitlines()


def of_device(cluster: Cluster, node: str) -> list[str]:
    """What the devices of ``node`` compiled and loaded, as they say it."""
    return [line for line in log_of(cluster, node) if re.search(rf"{node}/\d+: (compiled|loaded)", line)]


def over(cluster: Cluster, job: str, count: int) -> JobView:
    """Wait until ``count`` incidents of ``job`` are over."""

    def check() -> JobView | None:
        view = cluster.client.job(job)
        assert view.state not in {"done", "failed"}, f"{view.state} too early: {view.reason}"
        done = [each for each in cluster.client.incidents() if each.job == job and not each.open]
        return view if len(done) == count else None

    return cluster.until(check, f"{count} incidents over", _COLD_S)
