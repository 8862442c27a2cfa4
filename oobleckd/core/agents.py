"""What agents say of their nodes and devices, and what the core does about it.

Owns who is to be told what when a node is here, is back, or has lost a device or a link. What concerns a job
is handed to the part that knows it.
"""

from __future__ import annotations

from typing import assert_never

import msgspec

from oobleckd.core import (
    checkpoints,
    deaths,
    devicefigures,
    inputs,
    jobs,
    lastcopy,
    precopy,
    preparing,
    reading,
    recovery,
    steps,
)
from oobleckd.core.context import Core
from oobleckd.core.entries import NodeDrained, NodeJoined
from oobleckd.core.events import (
    Heard,
)
from oobleckd.core.run import Run
from oobleckd.planner.plan import node_of
from oobleckd.protocol import versions
from oobleckd.protocol.agentmessages import (
    DeviceAwake,
    DeviceLost,
    DeviceStopped,
    Goodbye,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
)
from oobleckd.protocol.changes import (
    DeploymentRetried,
    DeviceReplaced,
    LinkClosed,
    NodeEnding,
    NodeHere,
    NodeRevived,
    SpareReady,
)
from oobleckd.protocol.checkpointmessages import CheckpointFailed, CheckpointPart
from oobleckd.protocol.datamessages import (
    Identified,
    InputsChanged,
    InputsChecked,
    InputsMoved,
    PrepareDone,
    PrepareFailed,
    Preparing,
)
from oobleckd.protocol.messages import (
    PROTOCOL,
    Corrupted,
    DeviceFailed,
    Emptied,
    Held,
    LinkDown,
    Measured,
    OpTimes,
    PreCopied,
    Progress,
    Ready,
    StepDone,
)
from oobleckd.protocol.text import all_visible
from oobleckd.words import seconds

_HEARTBEAT_OF_NODE_S = (
    1e-4  # 10,000 nodes send heartbeats once a second, which is a third of a core (docs/decisions.md)
)
OfJob = (
    Measured
    | PreCopied
    | Emptied
    | Ready
    | Progress
    | Held
    | StepDone
    | OpTimes
    | CheckpointPart
    | CheckpointFailed
    | DeviceFailed
    | Corrupted
)

_IN_WORDS = (
    Hello
    | DeviceLost
    | DeviceStopped
    | LinkDown
    | DeviceFailed
    | Identified
    | InputsChanged
    | PrepareFailed
    | Goodbye
)
"""Messages with words for people, or of the machine, that views and later sentences have from memory."""


def heard(core: Core, event: Heard) -> None:
    """A message of an agent, or of a device by way of it."""
    node = event.node
    core.members.heard(node, core.now)
    message = event.message
    if isinstance(message, _IN_WORDS):
        message = all_visible(message)
    match message:
        case Hello():
            _hello(core, message)
        case Heartbeat():
            if core.members.heartbeat(node, message.incarnation, core.now):
                _revived(core, node)
        case DeviceLost():
            _device_lost(core, node, message)
        case DeviceStopped():
            lastcopy.on_stopped(core, node, message)
        case DeviceAwake():
            lastcopy.on_awake(core, node, message)
        case LinkDown():
            link_down(core, message)
        case Goodbye():
            core.members.goodbye(node, message, core.now)
        case Identified() | InputsChecked() | InputsChanged() | InputsMoved():
            reading.heard(core, message)
        case Preparing() | PrepareDone() | PrepareFailed():
            preparing.heard(core, node, message)
        case _:
            _heard_of_job(core, message)


def _heard_of_job(core: Core, message: OfJob) -> None:
    match message:
        case Measured():
            reading.on_measured(core, message)
        case PreCopied():
            precopy.on_precopied(core, message)
        case Emptied():
            core.members.emptied(message.device, message.order)
        case Ready():
            reading.on_ready(core, message)
        case Progress():
            recovery.on_progress(core, message)
        case Held():
            steps.on_held(core, message)
        case StepDone():
            steps.on_step_done(core, message)
        case OpTimes():
            steps.on_op_times(core, message)
        case CheckpointPart() | CheckpointFailed():
            checkpoints.told(core, message)
        case DeviceFailed():
            _device_failed(core, message)
        case Corrupted():
            recovery.on_corrupted(core, message)
        case _:
            assert_never(message)


def _hello(core: Core, message: Hello) -> None:
    protocol = versions.spoken(message.protocol, message.oldest)
    if protocol is None:
        theirs, ours = (
            versions.words(message.protocol, message.oldest),
            versions.words(PROTOCOL, versions.OLDEST),
        )
        reason = f"the daemon speaks protocol {ours} and this worker {theirs}"
        hint = "install the same version of oobleckd on both"
        core.tell(message.node, Refused(reason, hint, "other-protocol"))
        return
    before = core.members.nodes.get(message.node)
    known = before is not None and before.incarnation == message.incarnation
    noticed = before.notice if before is not None and known else ""
    was_counted = before is not None and known and (before.ready or before.mending)
    had_spare = before is not None and known and before.spare is not None and before.spare.ready
    change = core.members.hello(message, core.now)
    config, incarnations = core.config, tuple(info.incarnation for info in message.devices)
    heartbeat_s = max(config.heartbeat_s, len(core.members.nodes) * _HEARTBEAT_OF_NODE_S)
    figures_s = devicefigures.every(config.figures_s, len(core.members.nodes))
    welcome = Welcome(protocol, config.daemon, heartbeat_s, config.lease_s, incarnations)
    more = {"figures_s": figures_s, "artifacts": config.artifacts}
    core.tell(message.node, msgspec.structs.replace(welcome, **more))
    if message.ready and not was_counted:
        core.joined_at = core.now
    _expect(core, message.node)
    if change == "new":
        inputs.begin_anew(core, message.node)
    if change != "same":
        text = f"{message.node} is {'here' if change == 'new' else 'back'} on {message.host}"
        here = NodeHere(message.node, message.host, back=change != "new")
        core.announce(text, here, (f"node:{message.node}",))
    if message.notice is not None and message.notice.reason != noticed:
        text = f"{message.node} is to end in {seconds(message.notice.left_s)}: {message.notice.reason}"
        ending = NodeEnding(message.node, message.notice.reason, message.notice.left_s)
        core.announce(text, ending, (f"node:{message.node}",), level="warn")
    if change != "same":
        preparing.remind(core, message.node, new=change == "new")
    if message.spare is not None and message.spare.ready and not had_spare:
        text = f"{message.node} has a spare ready"
        core.announce(text, SpareReady(message.node), (f"node:{message.node}",))
    for info in message.devices:
        if core.run is not None:
            recovery.remind(core, core.run, info.device, back=change != "same")
        elif info.job or (change == "back" and core.members.owes(info.device)):
            core.release(info.device, info.job)


def _expect(core: Core, name: str) -> None:
    """It is here: where it should be known that it was, if the daemon is started anew."""
    node = core.members.nodes[name]
    known = core.state.nodes.get(name)
    if known is None or known.lost or (known.host, known.zone) != (node.host, node.zone):
        # Nodes that should be here are those that joined and did not leave in order, and not those with
        # a key: keys are made for nodes that may never be bought. (D-daemon-018)
        core.record(NodeJoined(name, node.host, node.zone, core.now))


def _device_lost(core: Core, name: str, message: DeviceLost) -> None:
    device = message.device
    known = core.members.living_node(name, message.incarnation)
    measuring = core.run.measuring if core.run is not None else ""
    if core.members.device_lost(name, message, core.now):
        if core.run is not None and measuring == device:
            core.run.measuring = ""  # the answer died with it
        text = f"{device} lost: {message.evidence}; the spare of {name} takes its place"
        said = DeviceReplaced(name, device, message.evidence)
        core.announce(text, said, (f"node:{name}",), level="warn")
    if known:
        deaths.died(core, message, measuring)


def link_lost(core: Core, name: str) -> None:
    """The connection of an agent closed."""
    core.members.link_lost(name, core.now)
    if name in core.members.nodes:
        core.announce(f"the link to {name} closed", LinkClosed(name), (f"node:{name}",), level="warn")


def link_down(core: Core, message: LinkDown) -> None:
    """Believed only of links between two incarnations that are in the layout, or in the one being
    deployed.
    """
    run = core.run
    if run is None:
        return
    if run.phase == "adrift":
        # After a restart the ends of a broken link may not have said Hello: it is looked at after that,
        # since agents keep it until the device is deployed anew. (D-detection-004)
        run.broken.append(message)  # its ends may not have said Hello yet
        return
    job, survivors = run.job, run.job.survivors()
    ends = (message.device, message.peer)
    if all(end in survivors and core.members.living(end, job.incarnations[end]) for end in ends):
        core.members.link_down(message, core.now)
    elif run.candidate is not None and all(end in run.candidate.incarnations for end in ends):
        # What was on its way is lost, and nobody would miss it: its target waits.
        _stumble(core, run, next(end for end in ends if end not in survivors), message)


def _stumble(core: Core, run: Run, joining: str, message: LinkDown) -> None:
    """A link of a device that only joins broke: once more with new links, then without its node."""
    if joining in run.stumbled:
        ends = f"{message.device} and {message.peer}"
        evict(core, node_of(joining), f"the link between {ends} breaks whenever it joins")
        return
    run.stumbled.add(joining)
    why = f"{message.device} lost its link to {message.peer} during a deployment: {message.why}"
    node = node_of(joining)
    peer = message.peer if joining == message.device else message.device
    said = DeploymentRetried(node, joining, peer, run.job.id, message.why)
    core.announce(f"{why}; once more", said, (f"node:{node}",), level="warn")
    recovery.restart_deployment(core, run, joining, why)


def _device_failed(core: Core, message: DeviceFailed) -> None:
    if message.damaged:
        recovery.on_damaged(core, message)
        return
    if message.unread:
        reading.on_unread(core, message)
        return
    job = core.state.jobs.get(message.job) or (core.run.job if core.run else None)
    node = core.members.nodes.get(node_of(message.device))
    if job is not None and not job.final and node is not None and node.alive:
        cause = message.cause or "device-refused"
        jobs.fail(core, job, f"{message.device}: {message.error}", message.hint, cause)


def _revived(core: Core, name: str) -> None:
    """An incarnation that was declared over is heard again: it joins as a fresh one, unless nobody has
    acted on its end yet.
    """
    core.joined_at = core.now
    _expect(core, name)
    if core.run is not None and core.run.phase == "adrift":
        core.announce(f"{name} is back", NodeRevived(name, fresh=False), (f"node:{name}",))
        return
    text = f"{name} is back after it was declared lost; it drops what it holds and joins anew"
    core.announce(text, NodeRevived(name, fresh=True), (f"node:{name}",))
    _drop_state(core, name)


def _drop_state(core: Core, name: str) -> None:
    """What the devices of an incarnation that was declared over hold is of no use any more."""
    if core.run is not None:
        for device in core.members.nodes[name].devices:
            core.release(device.device, core.run.job.id)


def evict(core: Core, name: str, cause: str) -> None:
    """End the incarnation of a node by decision, and keep it out of plans."""
    core.record(NodeDrained(name, f"evicted: {cause}", undo=False, at=core.now, cause="evicted"))
    core.members.evict(name, cause, core.now, "links-down")
    _drop_state(core, name)
