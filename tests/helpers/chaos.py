"""Random failures by seed on a real cluster: what dies, when, and what must hold afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from typing import cast

from oobleckd.protocol.parts import How
from planner.plan import node_of
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.manners import KEEPING, Manner, manner_of
from tests.helpers.matrix import MOVING_TRAIN, survivable

HOWS = ("device", "one-device", "sigkill", "agent-only", "sigterm", "sigstop", "hang", "net-drop")
_AWAY_S = 6.0  # how long a node is stopped or cut off: long enough to be given up
_DAEMON_EVERY = 3  # in every third run the daemon dies, too


def random_seed(cluster: Cluster, seed: int, hows: Sequence[str] = HOWS, manner: Manner | None = None) -> str:
    """A job during which one or two nodes fail at random times, in one of ``hows``. Returns what was done."""
    rng = random.Random(seed)
    cluster.heal()
    cluster.usable(cluster.num_nodes)
    manner = manner or manner_of(seed)
    tables = manner.tables(cluster.num_devices)
    job = cluster.client.submit(tiny_job(f"chaos-{seed}", train={"steps": 40}, **tables)).id
    story: list[str] = []
    struck: set[str] = set()
    for _ in range(rng.choice([1, 1, 2])):
        view = cluster.at_step(job, 2 + len(story))
        time.sleep(rng.random() * 1.5)
        view = cluster.client.job(job)
        if view.state != "running":
            break
        wanted = rng.choice([1, 1, 2])
        doomed: list[str] = []
        risk = struck - recovered(cluster, job)
        vacant = {node_of(device) for p in view.pipelines for device in p.vacant}
        nodes = [n for p in view.pipelines for n in p.nodes if n not in vacant]
        for node in rng.sample(nodes, len(nodes)):
            if len(doomed) < wanted and survivable(view, {*risk, *doomed, node}):
                doomed.append(node)
        how = rng.choice(hows)
        story.append(f"step {view.step}: {how} {'+'.join(doomed)}")
        for node in doomed:
            fail(cluster, node, how)
        struck.update(doomed)
    if seed % _DAEMON_EVERY == 0:
        story.append("the daemon")
        time.sleep(rng.random())
        cluster.kill_daemon()
        time.sleep(rng.random())
        cluster.start_daemon()
    done = cluster.job_in(job, "done")
    assert manner.policy not in KEEPING or done.steps_lost == 0, f"{done.steps_lost} steps lost"
    if done.steps_lost:
        story.append(f"{done.steps_lost} steps lost")
    cluster.verify(job)
    return "; ".join(story) or "nothing killed"


def recovered(cluster: Cluster, job: str) -> set[str]:
    """Nodes whose failure the job has behind it. A hang or a cut is noticed seconds after it was made."""
    return {node for i in cluster.client.incidents() if i.job == job and not i.open for node in i.nodes}


def fail(cluster: Cluster, node: str, how: str) -> None:
    """Have ``node`` fail: from outside where a signal does it, else by the daemon's injection."""
    if how in {"device", "one-device", "sigkill", "agent-only"}:
        cluster.kill(node, how)
    else:
        seconds = _AWAY_S if how in {"sigstop", "net-drop"} else 0.0
        cluster.client.kill(node, cast("How", how), seconds=seconds)


def daemon_seed(cluster: Cluster, seed: int, *, with_node: bool, manner: Manner | None = None) -> str:
    """kill -9 of the daemon in the middle of training; with ``with_node`` a node dies while it is away."""
    rng = random.Random(seed)
    cluster.heal()
    cluster.usable(cluster.num_nodes)
    incidents = len(cluster.client.incidents())
    tables = (manner or manner_of(seed)).tables(cluster.num_devices)
    job = cluster.client.submit(tiny_job(f"daemon-{seed}", train=MOVING_TRAIN, **tables)).id
    cluster.at_step(job, 3)
    time.sleep(rng.random())
    before = cluster.client.job(job)
    pids = {node.name: node.pids[0] for node in cluster.client.nodes()}
    cluster.kill_daemon()
    story = f"daemon at step {before.step}"
    if with_node:
        nodes = [n for p in before.pipelines for n in p.nodes]
        victim = rng.choice([n for n in nodes if survivable(before, {n})])
        os.kill(pids[victim], signal.SIGKILL)
        story += f", {victim} while it was away"
    time.sleep(0.3 + rng.random())
    cluster.start_daemon()
    done = cluster.job_in(job, "done")
    steps = cluster.client.steps(job)
    assert [s.step for s in steps] == list(range(1, done.steps + 1)), "steps are missing"
    opened = len(cluster.client.incidents()) - incidents
    assert opened == (1 if with_node else 0), f"{opened} incidents"
    cluster.verify(job)
    return story
