"""oobleckd under failures of every kind, 2 pipelines of 2 stages (or more): what each of them costs."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.cluster import Cluster, depths, job_of
from benchmarks.cost import Cost, missing_of
from benchmarks.peers import shape
from benchmarks.peers.recovering import NORMAL_STEPS
from oobleckd.ctl.local import DAEMON
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView, StepView

_STEPS_FOR_MEDIAN = 20
_STOPPED_S = 5.0
_DAEMON_AWAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A kind of failure: ``strike`` fails a node, ``mend`` is what a service manager would do afterwards.

    The job wants two pipelines of ``depth`` nodes; ``standby`` more are there, with warm spares or without.
    The job's policy is ``policy``; with ``kept`` devices keep what they send until the commit, and their sums
    are copied to a peer ``sum_copies`` times in a step.
    """

    name: str
    strike: Callable[[Cluster, str], None]
    mend: Callable[[Cluster, str], None] | None = None
    depth: int = 2
    standby: int = 0
    spare: bool = False
    policy: str = "oobleck"
    kept: bool = True
    sum_copies: int = 0

    @property
    def whole(self) -> list[int]:
        """Devices of the pipelines when nothing is missing."""
        return [self.depth] * 2

    @property
    def nodes(self) -> int:
        """Of the cluster."""
        return 2 * self.depth + self.standby

    @property
    def schedule(self) -> dict[str, object]:
        """Of the job."""
        return {"sum_copies": self.sum_copies} | ({} if self.kept else {"boundary_memory": 0})


def _kill_in_backward(cluster: Cluster, node: str) -> None:
    cluster.client.kill(node, "device", at="backward")


def _kill_device(cluster: Cluster, node: str) -> None:
    os.kill(next(view.pids[0] for view in cluster.client.nodes() if view.name == node), signal.SIGKILL)


def _stop(cluster: Cluster, node: str) -> None:
    cluster.client.kill(node, "sigstop", seconds=_STOPPED_S)


def _daemon_away(cluster: Cluster, _node: str) -> None:
    cluster.kill(DAEMON)
    time.sleep(_DAEMON_AWAY_S)
    cluster.start(DAEMON)


FAULTS = {
    "oobleckd": Fault("oobleckd, 2 pipelines of 2 stages", _kill_device),
    "unkept": Fault("oobleckd, nothing kept at boundaries", _kill_device, kept=False),
    "slipstream": Fault("oobleckd, policy slipstream", _kill_device, policy="slipstream"),
    "slipstream-unkept": Fault(
        "oobleckd, slipstream, nothing kept", _kill_device, policy="slipstream", kept=False
    ),
    "backward": Fault("oobleckd, killed in a backward pass", _kill_in_backward),
    "backward-copied": Fault("oobleckd, the same, sums copied", _kill_in_backward, sum_copies=3),
    "backward-copied-slipstream": Fault(
        "oobleckd, sums copied, under slipstream", _kill_in_backward, policy="slipstream", sum_copies=3
    ),
    "backward-unkept": Fault("oobleckd, the same, nothing kept", _kill_in_backward, kept=False),
    "backward-deep": Fault("oobleckd, the same of 4 stages", _kill_in_backward, depth=4),
    "backward-deep-slipstream": Fault(
        "oobleckd, the same under slipstream", _kill_in_backward, depth=4, policy="slipstream"
    ),
    "spare": Fault("oobleckd, the node has a warm spare", _kill_device, spare=True),
    "sigstop": Fault(f"oobleckd, SIGSTOP of a node for {_STOPPED_S:g} s", _stop),
    "agent": Fault("oobleckd, kill -9 of a node's agent", Cluster.kill, Cluster.start),
    "standby": Fault("oobleckd, the same, a standby node", Cluster.kill, Cluster.start, standby=1),
    "daemon": Fault(f"oobleckd, the daemon away for {_DAEMON_AWAY_S:g} s", _daemon_away),
}


def rounds_of(fault: Fault, cluster: Cluster, rounds: int, rng: random.Random) -> Iterator[Cost]:
    """Strike one node after the other, each at a random moment of a step of a job that is whole again."""
    cluster.until(lambda: _at_hand(cluster, fault) or None, "all nodes and spares")
    spec = job_of(
        "recovery", steps=10**6, f=1, depth=fault.depth, max_nodes=2 * fault.depth, policy=fault.policy,
        schedule=fault.schedule,
    )  # fmt: skip
    job = cluster.submit(spec)
    cluster.in_state(job, "running")
    for _ in range(rounds):
        before = _normal(cluster, job, fault)
        time.sleep(rng.random() * before.step_s)
        before = cluster.client.job(job)
        victim = rng.choice([node for pipeline in before.pipelines for node in pipeline.nodes])
        struck_at = time.time()
        fault.strike(cluster, victim)
        if fault.strike is _daemon_away:
            yield _cost_of_absence(cluster, job, before)
            continue
        if fault.mend:
            _gone_on(cluster, job, before)
            fault.mend(cluster, victim)
        after, devices = _whole(cluster, job, before.incidents, fault.whole)
        if fault.strike is _kill_in_backward:
            struck_at = cluster.fired()[-1]["at"]
        steps = cluster.client.steps(job, since=max(0, before.step - _STEPS_FOR_MEDIAN))
        incidents = [incident for incident in cluster.client.incidents() if incident.job == job]
        yield cost_of(
            steps,
            incidents[before.incidents :],
            struck_at,
            before.epoch,
            after.epoch,
            devices,
            2 * fault.depth,
        )
    cluster.end(job)


def _normal(cluster: Cluster, job: str, fault: Fault) -> JobView:
    """Wait for some steps that nothing disturbs, on two pipelines of two stages, spares and
    standby at hand.
    """
    start = -1

    def check() -> JobView | None:
        nonlocal start
        view = cluster.client.job(job)
        whole = view.state == "running" and depths(view) == fault.whole
        start = -1 if not (whole and _at_hand(cluster, fault)) else view.step if start < 0 else start
        return view if start >= 0 and view.step >= start + NORMAL_STEPS else None

    return cluster.until(check, f"{NORMAL_STEPS} undisturbed steps on pipelines of {fault.whole} stages")


def _at_hand(cluster: Cluster, fault: Fault) -> bool:
    """Whether all nodes, and their spares, can be used."""
    nodes = [node for node in cluster.client.nodes() if node.state in {"active", "standby"}]
    return len(nodes) == fault.nodes and (not fault.spare or all(node.spare == "ready" for node in nodes))


def _gone_on(cluster: Cluster, job: str, before: JobView) -> None:
    """Wait for the first step without the node that failed."""

    def check() -> bool | None:
        last = cluster.client.steps(job, since=before.step)
        return True if last and last[-1].epoch > before.epoch else None

    cluster.until(check, "a step after a failure")


def _whole(
    cluster: Cluster, job: str, incidents_before: int, whole: list[int]
) -> tuple[JobView, dict[int, int]]:
    """Wait until the incident is closed and a step is committed on ``whole`` pipelines again.

    Returns the job and how many devices were at work in each epoch on the way.
    """
    devices: dict[int, int] = {}

    def check() -> JobView | None:
        view = cluster.client.job(job)
        devices[view.epoch] = sum(depths(view))
        closed = view.state == "running" and view.incidents > incidents_before and depths(view) == whole
        if not closed or any(incident.open for incident in cluster.client.incidents()):
            return None
        last = cluster.client.steps(job, since=view.step)
        return view if last and last[-1].epoch >= view.epoch else None

    return cluster.until(check, f"pipelines of {whole} stages again after a failure"), devices


def cost_of(
    steps: Sequence[StepView],
    incidents: Sequence[IncidentView],
    struck_at: float,
    epoch: int,
    whole_epoch: int,
    devices: Mapping[int, int],
    num_devices: int = shape.NUM_PROCESSES,
) -> Cost:
    """What a failure cost, from the steps around it.

    ``epoch`` was in force when it struck, so the first step of a later one is the first that was committed
    without the failed device; ``whole_epoch`` is that of the plan with all devices again. ``devices`` of
    ``num_devices`` in the plan by epoch; an epoch that nobody saw has those of the next. The interrupted step
    is finished under the old plan.
    """
    earlier = [step.at for step in steps if step.at <= struck_at][-_STEPS_FOR_MEDIAN:]
    after = [step for step in steps if step.epoch > epoch]
    until_whole = [step for step in after if step.epoch < whole_epoch]
    until_whole.append(next(step for step in after if step.epoch >= whole_epoch))
    at_work = [min(_planned(devices, step.epoch), num_devices - 1) for step in until_whole[:-1]]
    shares = [
        (step.at, 1 - count / num_devices)
        for step, count in zip(until_whole, [*at_work, num_devices], strict=True)
    ]
    missing, missing_s = missing_of(shares)
    work = sum(incident.step_layer_gradients for incident in incidents)
    return Cost(
        step_s=statistics.median(later - before for before, later in pairwise(earlier)),
        next_step_s=after[0].at - struck_at,
        steps_redone=sum(incident.steps_lost for incident in incidents),
        attempts_discarded=sum(step.outcome == "repeated" for step in after),
        samples_lost=_never_done(steps) * shape.GLOBAL_BATCH,
        samples_short=sum(shape.GLOBAL_BATCH - step.samples for step in after),
        whole_s=until_whole[-1].at - struck_at,
        missing=missing,
        missing_s=missing_s,
        copied_bytes=sum(incident.copied_bytes for incident in incidents),
        redone_share=sum(i.layer_gradients for i in incidents) / work if work else None,
        forwards_share=sum(i.layer_forwards for i in incidents) / work if work else None,
        phases=_phases(incidents, struck_at),
    )


def _phases(incidents: Sequence[IncidentView], struck_at: float) -> dict[str, float]:
    """Seconds of each phase, over all incidents; the first of them is detected from when it struck."""
    phases: dict[str, float] = {}
    for incident in incidents:
        for phase in incident.phases:
            phases[phase.phase] = phases.get(phase.phase, 0.0) + phase.duration_s
    if incidents and "detect" in phases:
        phases["detect"] += incidents[0].at - struck_at
    return phases


def _planned(devices: Mapping[int, int], epoch: int) -> int:
    return devices[min(seen for seen in devices if seen >= epoch)]


def _never_done(steps: Sequence[StepView]) -> int:
    """Steps that are missing between the first and the last."""
    numbers = sorted({step.step for step in steps})
    return sum(later - earlier - 1 for earlier, later in pairwise(numbers))


def _cost_of_absence(cluster: Cluster, job: str, before: JobView) -> Cost:
    """What it cost that the daemon was away: the devices time their steps themselves."""
    seen = cluster.client.job(job).step

    def check() -> bool | None:
        return True if cluster.client.job(job).step >= seen + 2 else None

    cluster.until(check, "steps after the daemon's return")
    return absence(
        cluster.client.steps(job, since=max(1, before.step - _STEPS_FOR_MEDIAN)),
        before.step,
        cluster.client.job(job).incidents - before.incidents,
    )


def absence(steps: Sequence[StepView], last_before: int, incidents: int) -> Cost:
    """The longest of the steps after ``last_before`` stands for the next step; an incident counts as a
    discarded step.
    """
    longest = max(step.step_s for step in steps if step.step > last_before)
    return Cost(
        step_s=statistics.median(step.step_s for step in steps if step.step <= last_before),
        next_step_s=longest,
        steps_redone=0,
        attempts_discarded=incidents + sum(step.outcome == "repeated" for step in steps),
        samples_lost=_never_done(steps) * shape.GLOBAL_BATCH,
        samples_short=sum(shape.GLOBAL_BATCH - step.samples for step in steps),
        whole_s=longest,
    )
