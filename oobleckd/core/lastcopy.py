"""Wakes devices that hold the last copy of a layer and do not run, and waits for them while that is cheaper
than the rollback.

Owns that judgement, for three kinds of silence that need not be an end: a device process that its agent finds
stopped, a node whose lease is over, and such a node that has not come back after a restart of this daemon.
Where others hold all of its layers, a stopped device is ended and a silent node given up as ever: that costs
nothing. Where an end is certain (a process that exited, a link that closed and that a peer lost, too) nobody
waits.

The rollback costs the steps since the last checkpoint and a deployment. Whoever waits for as long as that,
and in vain, has paid twice at most, and never more than ``MAX_S``.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection

from oobleckd.core import failures, incidents, recovery
from oobleckd.core.context import Core
from oobleckd.core.run import Run, Wait
from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import node_of
from oobleckd.planner.policy import ROLLING_BACK
from oobleckd.protocol.agentmessages import DeviceAwake, DeviceStopped, EndStopped, Wake
from oobleckd.protocol.changes import LastCopyAwaited, LastCopyWaitOver
from oobleckd.protocol.incidentviews import LossView, ReasonView
from oobleckd.words import count, noun, seconds

# Who waits for as long as the rollback costs, and in vain, has paid twice at most; without knowing how long
# stops last there is no better bound. (D-detection-015)
MAX_S = 60.0
DEPLOY_S = 5.0
"""A rollback besides the steps, until this job has had one: plan, processes, weights."""
RESTART_S = 10.0
"""More, where the plan needs the node itself, whose devices are to start anew first."""
_MIN_S = 2.0  # for SIGCONT to take, however long it has been stopped by now
_LOOK_S = 0.1
ENDS = frozenset({"sigkill", "sigterm", "agent-only", "device", "host"})
"""Of ``kill-node``: what ends a wait."""


# ---------------------------------------------------------------------- a device that is stopped


def on_stopped(core: Core, node: str, message: DeviceStopped) -> None:
    """An agent finds a device stopped, and goes on finding it so: it is ended, or woken and waited for."""
    run, device = core.run, message.device
    member = core.members.nodes.get(node)
    if member is None or member.incarnation != message.incarnation or not member.alive:
        return
    if (
        run is None
        or device not in run.job.survivors()
        or run.job.incarnations[device] != message.device_incarnation
    ):
        core.tell(node, EndStopped(device, message.device_incarnation))
        return
    wait = run.waits.get(device)
    if wait is None and run.ending.get(device) != message.device_incarnation:
        layers = _lost_with(core, run, [device])
        # The core and not the agent ends a stopped device: only here is it known who holds a last copy at
        # this moment, and with whom else it would be ended. (D-detection-014)
        if not (layers or run.job.spec.fault_tolerance.policy in ROLLING_BACK):
            _end(core, run, device)
            return
        since = core.now - message.stopped_s
        member.suspect_at = since if member.suspect_at is None else min(since, member.suspect_at)
        budget_s = _rollback_s(core, run, [node], ended=False)
        left_s = max(_MIN_S, budget_s - max(0.0, message.stopped_s - 1.0))
        wait = Wait(layers, since, core.members.waking(core.now) + left_s, 0.0, message.device_incarnation)
        _begin(core, run, device, wait, f"is stopped ({message.evidence})", "sent SIGCONT, ", left_s)
    if wait is None or core.members.waking(core.now) >= wait.until:
        _end(core, run, device)
    else:
        core.tell(node, Wake(device, message.device_incarnation))


def on_awake(core: Core, node: str, message: DeviceAwake) -> None:
    """Wait no longer for a device that goes on."""
    run, member = core.run, core.members.nodes.get(node)
    if member is not None and member.incarnation == message.incarnation:
        member.suspect_at = None
    if run is None:
        return
    wait = run.waits.get(message.device)
    if wait is not None and wait.incarnation == message.device_incarnation:
        _goes_on(core, run, message.device, message.stopped_s)
    if run.ending.get(message.device) == message.device_incarnation:
        del run.ending[message.device]  # it went on before its agent was told


def _end(core: Core, run: Run, device: str) -> None:
    """Its agent is to end it; what follows then is a loss like any other."""
    incarnation = run.job.incarnations[device]
    run.ending[device] = incarnation
    core.tell(device, EndStopped(device, incarnation))
    if device in run.waits:
        _in_vain(core, run, device)


# ---------------------------------------------------------------------- a node that is silent


def spared(core: Core, name: str) -> bool:
    """Whether the node ``name``, whose lease is over, is waited for all the same."""
    run, node = core.run, core.members.nodes[name]
    if run is None or run.job.layout is None:
        return False
    if name not in run.waits:
        layers = _lost_with(core, run, [device for device in run.job.survivors() if node_of(device) == name])
        # Whose link has closed is no stopped one; and where nobody is heard there is nobody who would wait.
        if not (layers and node.connected and core.members.hears_others(node, core.now)):
            return False
        budget_s = _rollback_s(core, run, [name], ended=True)
        wait = Wait(layers, node.heard_at, core.members.waking(core.now) + budget_s, node.lease.heard)
        _begin(core, run, name, wait, "is silent", "", budget_s)
    return _still(core, run, name)


def awaited(core: Core, run: Run) -> bool:
    """After a restart of this daemon, its grace being over: whether nodes that were waited for before it, as
    the open incident has them, still are.
    """
    silent = run.incident.nodes if run.incident is not None else ()
    names = [name for name in recovery.awaited(core, run) if name in silent]
    layers = _lost_with(core, run, [device for device in run.job.survivors() if node_of(device) in names])
    if not layers or run.forgotten:
        return False
    for name in names:
        if name not in run.waits:
            budget_s = _rollback_s(core, run, names, ended=True)
            wait = Wait(layers, core.now, core.members.waking(core.now) + budget_s, float("-inf"))
            _begin(core, run, name, wait, "has not come back after the daemon's restart", "", budget_s)
    return not [name for name in names if not _still(core, run, name)]


def _still(core: Core, run: Run, name: str) -> bool:
    """Whether its time is not up yet."""
    if core.members.waking(core.now) < run.waits[name].until:
        return True
    _in_vain(core, run, name)
    return False


# ---------------------------------------------------------------------- while somebody is waited for


def look(core: Core, run: Run) -> None:
    """Who is heard again is waited for no longer, nor is whoever has died meanwhile."""
    run.ending = {
        name: incarnation
        for name, incarnation in run.ending.items()
        if core.members.living(name, incarnation)
    }
    for name, wait in sorted(run.waits.items()):
        node = core.members.nodes.get(node_of(name) or name)
        if wait.incarnation:
            if not core.members.living(name, wait.incarnation):
                del run.waits[name]
            elif core.members.waking(core.now) >= wait.until:
                _end(core, run, name)
        elif node is not None and not _lives_on(core, run, name):
            del run.waits[name]
        elif node is not None and node.lease.heard > wait.heard:
            _goes_on(core, run, name, core.now - wait.since)


def _lives_on(core: Core, run: Run, node: str) -> bool:
    """Whether the node still has the devices that hold what it is waited for."""
    held = [device for device in run.job.survivors() if node_of(device) == node]
    return any(core.members.living(device, run.job.incarnations[device]) for device in held)


def deadline(core: Core, run: Run) -> float | None:
    """When to look again; None while nobody is waited for."""
    return core.now + _LOOK_S if run.waits else None


def end_wait(core: Core, node: str) -> bool:
    """Somebody says that the node is not to be waited for: it is lost now. False where nobody
    waits for it.
    """
    run = core.run
    names = [name for name in run.waits if node in {name, node_of(name)}] if run is not None else []
    for name in names:
        assert run is not None
        if run.waits[name].incarnation:
            _end(core, run, name)
        elif node in core.members.nodes:
            del run.waits[name]
            why = "given up by kill-node while it was waited for"
            core.members.evict(node, why, core.now, "given-up")
        else:
            run.waits[name].until = float("-inf")
    return bool(names)


def _begin(core: Core, run: Run, name: str, wait: Wait, how: str, act: str, budget_s: float) -> None:
    job, steps = run.job, _steps_back(run.job)
    node, what = node_of(name) or name, _what(wait)
    text = (
        f"{name} holds {what} and {how}: {act}waited for up to {seconds(budget_s)} (the rollback costs "
        f"{count(steps, 'step')}, {seconds(budget_s)}); "
        f"`oobleckctl kill-node {node}` ends the wait"
    )
    if run.incident is None and run.phase == "run":
        lost = LossView(node, "device-stopped", name) if node_of(name) else LossView(node, "silent")
        incidents.loss(core, run, [node], f"{name} {how}", wait.since, job.epoch, (lost,))
        assert run.incident is not None
        wait.incident = run.incident.id
    run.waits[name] = wait
    story = [f"job:{job.id}", f"node:{node}"]
    if run.incident is not None:
        story.append(f"incident:{run.incident.id}")
    said = LastCopyAwaited(node, job.id, tuple(wait.layers), budget_s, steps)
    core.announce(text, said, story, level="warn")
    core.explain(job, f"waits for {name}, which {how} and holds {what}", "last-copy")


def _goes_on(core: Core, run: Run, name: str, after_s: float) -> None:
    wait, incident = run.waits.pop(name), run.incident
    node = node_of(name) or name
    text = f"{name} goes on after {seconds(after_s)}: no step is lost"
    device = name if node != name else ""
    said = LastCopyWaitOver(node, run.job.id, back=True, device=device, after_s=after_s)
    core.announce(text, said, (f"job:{run.job.id}", f"node:{node}"))
    if not run.waits:
        core.explain(run.job, "")
    if incident is not None and incident.id == wait.incident and incident.phase == "detect" and not run.waits:
        incident.parts = ReasonView(plan=text, way="stay")
        incidents.close(core, run)


def _in_vain(core: Core, run: Run, name: str) -> None:
    wait = run.waits.pop(name)
    node = node_of(name) or name
    text = f"{name} was waited for in vain"
    story = (f"job:{run.job.id}", f"node:{node}")
    device, after_s = name if node != name else "", core.now - wait.since
    said = LastCopyWaitOver(node, run.job.id, back=False, device=device, after_s=after_s)
    core.announce(text, said, story, level="warn")


# ---------------------------------------------------------------------- what an end would cost


def _lost_with(core: Core, run: Run, devices: Collection[str]) -> tuple[int, ...]:
    """The layers that nobody would hold without ``devices``, without those that are about to be ended, and
    without those of which nobody knows that they live: after a restart of this daemon losses are not looked
    at before all are back.
    """
    job = run.job
    if job.layout is None or not devices:
        return ()
    unknown = [
        device for device in job.survivors() if not core.members.living(device, job.incarnations[device])
    ]
    return job.layout.lost({*job.dead, *run.ending, *unknown, *devices})


def _steps_back(job: JobRecord) -> int:
    kept = job.checkpoint_counters.step if job.checkpoint else job.start.step
    return max(0, job.counters.step - kept)


def _rollback_s(core: Core, run: Run, nodes: Collection[str], *, ended: bool) -> float:
    """Seconds that the rollback is modelled to cost, ``MAX_S`` at most. ``ended``: the nodes are given up, so
    if too few others are left there is nothing better to do than to wait.
    """
    job = run.job
    few = len(core.candidates(job, nodes)) < job.n0
    if few and ended:
        return MAX_S
    took = [view.total_s for view in core.state.incidents.values() if view.job == job.id and view.steps_lost]
    deploy_s = statistics.median(took) if took else DEPLOY_S
    redo_s = _steps_back(job) * failures.step_s(job)
    return min(MAX_S, redo_s + deploy_s + (RESTART_S if few and not took else 0.0))


def _what(wait: Wait) -> str:
    """What would be lost, for a sentence."""
    if not wait.layers:
        return "a part of the state, and the job's policy rolls back at every loss,"
    ranges: list[list[int]] = []
    for layer in wait.layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    names = ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in ranges)
    return f"the last copy of {noun(len(wait.layers), 'layer')} {names}"
