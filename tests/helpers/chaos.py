"""Random failures by seed on a real cluster: what dies, when, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest

from oobleckd.planner.plan import node_of
from oobleckd.planner.policy import WITH_REDUNDANT_LAYERS
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.parts import How
from oobleckd.unixhttp import ClientError
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.manners import KEEPING, Manner, manner_of
from tests.helpers.matrix import MOVING_TRAIN, survivable
from tests.helpers.sharedmatrix import shared_resources
from tests.helpers.smalldisk import SmallDisk

OF_NODES = ("device", "one-device", "sigkill", "agent-only", "sigterm", "sigstop", "hang", "net-drop")
OF_JOBS = ("last-copy", "disk-full", "data-replaced", "data-written")
"""What is done to the job's state or files rather than to a node (``Scene``)."""
HOWS = (*OF_NODES, *OF_JOBS)
_SMALL_DISK_BYTES = 64 * 2**20
_TEXT = b"All of this is read again and again, by whoever is there. " * 2000
_OTHER = _TEXT.translate(bytes.maketrans(b"abcdefgh", b"ABCDEFGH"))
_AWAY_S = 6.0  # how long a node is stopped or cut off: long enough to be given up
_SLOW = 8.0  # times
_DAEMON_EVERY = 3  # in every third run the daemon dies, too


def random_seed(
    cluster: Cluster, seed: int, hows: Sequence[str] = HOWS, manner: Manner | None = None, each: int = 1
) -> str:
    """A job during which one or two nodes fail at random times, in one of ``hows``. Returns what was done.
    Its stages have ``each`` devices, which a node has.
    """
    rng = random.Random(seed)
    cluster.heal()
    cluster.usable(cluster.num_nodes)
    manner = manner or manner_of(seed)
    tables = manner.tables(cluster.num_devices)
    if each > 1:
        nodes = 2 if manner.policy in WITH_REDUNDANT_LAYERS else 1 + seed % 2
        tables |= {"resources": shared_resources(each, nodes)}
    with contextlib.ExitStack() as stack:
        return _seed(Scene(cluster, stack), rng, seed, hows, manner, tables)


class Scene:
    """One run on ``cluster``: what is done to its job, and undone in the end; ``stack`` ends it."""

    def __init__(self, cluster: Cluster, stack: contextlib.ExitStack) -> None:
        self.cluster = cluster
        self.disk = stack.enter_context(SmallDisk(cluster.state / "small", _SMALL_DISK_BYTES))
        self.text, self.written = cluster.state / "text", False
        self.text.write_bytes(_TEXT)

    def tables(self) -> dict[str, dict[str, object]]:
        """Of job.toml."""
        data = {"source": "text", "path": str(self.text)}
        return {"checkpoint": {"every": 0, "dir": str(self.disk.path)}, "data": data}

    def strike(self, how: str, job: str, rng: random.Random) -> str:
        """Do ``how``; what was done."""
        if how == "last-copy":
            return self._stop_last_copy(job, rng)
        if how in {"data-replaced", "data-written"}:
            self._change_text(in_place=how == "data-written")
            return how
        self.disk.fill()
        with contextlib.suppress(ClientError):  # it is at its end, and writes the last one anyway
            self.cluster.client.control(job, "checkpoint")
        return "disk full"

    def _stop_last_copy(self, job: str, rng: random.Random) -> str:
        """SIGSTOP of the devices of so many nodes at once that a layer has no other holder: whoever is the
        last is woken.
        """
        view = self.cluster.client.job(job)
        nodes = sorted(node for pipeline in view.pipelines for node in pipeline.nodes)
        stopped: set[str] = set()
        for node in rng.sample(nodes, len(nodes)):
            if survivable(view, stopped):
                stopped.add(node)
        for node in sorted(stopped):
            for pid in self.cluster.device_pids(node):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        return f"stopped {'+'.join(sorted(stopped))}"

    def _change_text(self, *, in_place: bool) -> None:
        """Devices that run have the old file open: what is put in its place they never see, what is written
        into it they read.
        """
        if in_place:
            self.written = True
            with self.text.open("r+b") as file:
                file.write(_OTHER)
        else:
            self._put_in_place(_OTHER)

    def _put_in_place(self, data: bytes) -> None:
        new = self.text.with_name("new")
        new.write_bytes(data)
        new.replace(self.text)

    def mend(self, job: str) -> str:
        """Before the job can end: the right text is there again, and who waits for room is given it. What was
        seen of the wait.
        """
        self._put_in_place(_TEXT)
        if not self.disk.filled:
            return ""
        seen = self.cluster.until(lambda: self._refused(job), "the full disk to be seen")
        self.disk.free()
        return seen

    def _refused(self, job: str) -> str | None:
        self.disk.fill()
        view = self.cluster.client.job(job)
        if view.state == "done":
            return "it came too late"
        return None if view.checkpoint_trouble is None else f"{view.checkpoint_trouble.tries} tries in vain"


def _seed(
    scene: Scene,
    rng: random.Random,
    seed: int,
    hows: Sequence[str],
    manner: Manner,
    tables: dict[str, dict[str, Any]],
) -> str:
    cluster = scene.cluster
    tables = tables | scene.tables()
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
        if how == "last-copy" and risk:
            how = "device"  # who else is missing may hold a copy that nobody could wake
        if how in OF_JOBS:
            story.append(f"step {view.step}: {scene.strike(how, job, rng)}")
            continue
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
    story += filter(None, [scene.mend(job)])
    done = cluster.job_in(job, "done", *(["failed"] if scene.written else []))
    if done.state == "failed":
        assert done.cause == "data-changed", f"{done.cause}: {done.reason}"
        return "; ".join([*story, "refused: the text was written to"])
    may_lose = scene.written or manner.policy not in KEEPING
    assert may_lose or done.steps_lost == 0, f"{done.steps_lost} steps lost"
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


def check_progress(before: JobView, done: JobView) -> None:
    """Its clock and its tokens went on over the daemon's death."""
    then, found, train = before.progress, done.progress, done.spec.train
    assert then is not None
    assert found is not None
    assert then.elapsed_s + 0.3 < found.elapsed_s
    assert found.left_s == 0.0
    assert found.tokens == found.total_tokens == train.steps * train.global_batch * train.sequence
    assert found.tokens_per_s == pytest.approx(found.tokens / found.elapsed_s)
    assert found.passes > 0.0, "no device said how much data there is"
    assert found.step_times is not None
    assert found.step_times.count == train.steps


def daemon_seed(cluster: Cluster, seed: int, *, with_node: bool, manner: Manner | None = None) -> str:
    """kill -9 of the daemon in the middle of training; with ``with_node`` a node dies while it is away."""
    rng = random.Random(seed)
    cluster.heal()
    cluster.usable(cluster.num_nodes)
    incidents = len(cluster.client.incidents())
    tables = (manner or manner_of(seed)).tables(cluster.num_devices)
    job = cluster.client.submit(tiny_job(f"daemon-{seed}", train=MOVING_TRAIN, **tables)).id
    cluster.slow_down(cluster.at_step(job, 3).nodes, _SLOW, _AWAY_S)  # it lasts, without work
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
    check_progress(before, done)
    opened = len(cluster.client.incidents()) - incidents
    assert opened == (1 if with_node else 0), f"{opened} incidents"
    cluster.verify(job)
    return story
