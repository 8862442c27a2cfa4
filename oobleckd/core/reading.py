"""Reacts to what devices say before they take part: of the text that they read (docs/mechanisms/data.md), and
of their canary.

The first deployment fixes what the job reads; who has something else is kept out of the plan. Where what
devices have mapped was written to, everything since the last checkpoint that is known to be good is given
back. Owns these reactions; the facts are ``inputs``'s.
"""

from __future__ import annotations

from typing import assert_never

from oobleckd.core import alike, deploy, inputs, jobs, recovery
from oobleckd.core.context import Core
from oobleckd.core.corruption import Finding
from oobleckd.core.entries import InputsFixed
from oobleckd.core.events import SetAside
from oobleckd.core.run import Run
from oobleckd.core.state import JobRecord, KeptCheckpoint
from oobleckd.planner.plan import node_of
from oobleckd.protocol.changes import FileMoved, Level
from oobleckd.protocol.datamessages import Identified, InputsChanged, InputsChecked, InputsMoved
from oobleckd.protocol.inputs import Inputs, completed, difference
from oobleckd.protocol.messages import DeviceFailed, Measured, Ready
from oobleckd.words import count, noun

_PUT_BACK = (
    "put the text back and submit with --resume; to train on with another text name it by another path"
)


def heard(core: Core, message: Identified | InputsChecked | InputsChanged | InputsMoved) -> None:
    """A device says something of what it reads."""
    match message:
        case Identified():
            on_identified(core, message)
        case InputsChecked():
            on_checked(core, message)
        case InputsChanged():
            on_changed(core, message)
        case InputsMoved():
            on_moved(core, message)
        case _:
            assert_never(message)


# ---------------------------------------------------------------------- before a device takes part


def on_measured(core: Core, message: Measured) -> None:
    """The profile is here, and what its device reads."""
    run = core.run
    if run is not None and run.measuring == message.device and message.job == run.job.id:
        _compare(core, run, message.device, message.inputs)
    jobs.on_measured(core, message)


def on_identified(core: Core, message: Identified) -> None:
    """A device begins with the job, or was asked: what it reads."""
    if message.canary:  # an answer to Identify has none
        core.members.hear_canary(message.device, message.canary)
    run = core.run
    if run is None or run.job.id != message.job:
        return
    if message.error:
        _refuse(core, run, message.device, message.error)
    elif not _compare(core, run, message.device, message.inputs):
        inputs.let_in(core, run, message.device)


def on_unread(core: Core, message: DeviceFailed) -> None:
    """A device cannot use what the job reads. The others are asked at once where nobody has it yet: the job
    ends if nobody does.
    """
    run = core.run
    if run is None or message.job not in {"", run.job.id}:
        return
    if run.measuring == message.device:
        run.measuring = ""
    first = not run.kept_out and not run.job.inputs
    run.unread = run.unread or message
    _refuse(core, run, message.device, message.error)
    if first:
        others = [core.members.nodes[name].devices for name in core.candidates(run.job)]
        inputs.ask(core, [devices[0].device for devices in others if devices])


def on_ready(core: Core, message: Ready) -> None:
    """A device is ready, if what it reads is what the job reads; with the last one of the first deployment
    that is fixed.
    """
    core.members.hear_canary(message.device, message.canary)
    run = core.run
    candidate = run.candidate if run is not None else None
    if run is None or candidate is None or message.epoch != candidate.epoch:
        return
    if message.device not in candidate.deploys or _compare(core, run, message.device, message.inputs):
        return
    said = {device: ready.inputs for device, ready in candidate.ready.items()}
    said[message.device] = message.inputs
    last = said.keys() == candidate.deploys.keys()
    if last and not run.job.inputs and not _fix_first(core, run, {d: i for d, i in said.items() if i}):
        return
    if last and not alike.as_told(core, run, candidate):
        # Known by now, so it happens once. Devices that differ must not begin to compare, and what a Resume
        # would say of it could be missed: a Report brings a layout into force, too. (D-exactness-021)
        _begin_anew(core, run, message.device, f"the canary of {message.device} says who may be compared")
        return
    deploy.on_ready(core, message)
    if last and run.job.layout is not None:
        incarnations = {device: run.job.incarnations[device] for device in run.job.survivors()}
        inputs.took_part(run, incarnations, run.job.counters)


def _fix_first(core: Core, run: Run, said: dict[str, Inputs]) -> bool:
    """What the most nodes read is what the job reads. False where they do not agree: the others are kept out,
    or the job ends.
    """
    found = inputs.groups(said)
    if not found:
        return True
    first, *others = found
    nodes = {node_of(device) for device in said}
    # When all of the first deployment are ready, and not by who measures: that is one device and may be the
    # odd one. Whom to believe of two only the user knows. (D-data-004)
    if 2 * len(first.nodes) <= len(nodes) and others:
        _fail_undecided(core, run, first, others[0])
        return False
    _fix(core, run, first.inputs)
    odd = [device for device in sorted(said) if inputs.wrong(run.job, said[device])]
    for device in odd:
        inputs.keep_out(core, run, device, inputs.wrong(run.job, said[device]))
    if odd:
        _without(core, run, odd[0], f"{', '.join(sorted(map(node_of, odd)))} read another text")
    return not odd


def _fix(core: Core, run: Run, found: Inputs) -> None:
    core.record(
        InputsFixed(run.job.id, completed(run.job.inputs, found) if run.job.inputs else found, core.now)
    )


def _fail_undecided(core: Core, run: Run, one: inputs.InputsGroup, other: inputs.InputsGroup) -> None:
    mine, theirs = min(one.nodes), min(other.nodes - one.nodes, default=min(other.nodes))
    error = (
        f"nodes do not read the same, and none has a majority: {_counted(one)} as {mine}, {_counted(other)} "
        f"as {theirs}; "
        f"compared with {mine}, on {theirs} {difference(one.inputs, other.inputs)}"
    )
    hint = "give all nodes the same text, then submit it again"
    jobs.fail(core, run.job, error, hint, "data-changed")


def _counted(group: inputs.InputsGroup) -> str:
    return count(len(group.nodes), "node")


def _compare(core: Core, run: Run, device: str, found: Inputs) -> bool:
    """Whether what ``device`` reads is not what the job reads; then it is kept out."""
    why = inputs.wrong(run.job, found)
    if why:
        _refuse(core, run, device, why)
    return bool(why)


def _refuse(core: Core, run: Run, device: str, why: str) -> None:
    inputs.keep_out(core, run, device, why)
    _without(core, run, device, f"{node_of(device)} is kept out of the plan: {why}")


def _without(core: Core, run: Run, device: str, why: str) -> None:
    """``device`` takes no part: whatever is under way with its node begins anew without it."""
    inside = run.job.survivors()
    deployed = run.candidate is not None and device in run.candidate.deploys
    if device in inside and not deployed:
        return  # one whose text has changed says so itself
    node = core.members.nodes.get(node_of(device))
    for info in node.devices if node is not None else ():
        if info.device in inside:
            continue
        run.preloads.told.pop(info.device, None)
        # A guest has opened what lies there now, and would say that for ever; its agent's last Hello may be
        # older than that.
        if deployed or info.job or info.device in run.guests:
            core.release(info.device, run.job.id)
    if deployed:
        _begin_anew(core, run, device, why)


def _begin_anew(core: Core, run: Run, device: str, why: str) -> None:
    """The deployment under way, which has ``device``, is made once more."""
    if run.job.layout is not None:
        recovery.restart_deployment(core, run, device, why)
    else:
        jobs.release(core, run)
        run.forget("off")
        if run.job.state == "deploying":
            core.move(run.job, "replan", why)


# ---------------------------------------------------------------------- while it reads


def on_checked(core: Core, message: InputsChecked) -> None:
    """A device has read all of its text once more, and it was the right one."""
    run = core.run
    if run is None or run.job.id != message.job or run.phase == "adrift":
        return
    job = run.job
    info = core.members.device(message.device)
    if info is None:
        return
    run.checked[info.incarnation] = max(message.counters.round, run.checked.get(info.incarnation, -1))
    if not all(each.whole for each in job.inputs):
        run.wholes[message.device] = message.inputs
        _fix_wholes(core, run)
    elif why := inputs.wrong(job, message.inputs):
        _differs(core, run, message.device, info.incarnation, why)
        return
    inputs.note_checks(core, run)


def _fix_wholes(core: Core, run: Run) -> None:
    """Of a text that takes minutes to be read all is known by now of so many nodes that it is the job's; or
    all have told, and no more do.
    """
    job = run.job
    inside = set(job.survivors())
    told = {device: found for device, found in run.wholes.items() if device in inside}
    found = inputs.groups(told)
    if not found or not job.inputs:
        return
    nodes = job.surviving_nodes()
    if 2 * len(found[0].nodes) > len(nodes):
        _fix(core, run, found[0].inputs)
        odd = [device for device in sorted(told) if inputs.wrong(job, told[device])]
        run.wholes.clear()
        for device in odd:
            inputs.keep_out(core, run, device, inputs.wrong(job, told[device]))
        if odd:
            _give_back(core, run, odd[0], inputs.wrong(job, told[odd[0]]))
    elif len(found) > 1 and told.keys() == inside:
        _fail_undecided(core, run, found[0], found[1])


def _differs(core: Core, run: Run, device: str, incarnation: str, why: str) -> None:
    """All of what ``device`` has open is known by now, and it is not the job's."""
    if device in run.job.survivors() or incarnation in run.reads_since:
        _give_back(core, run, device, why)
    else:
        _refuse(core, run, device, why)


def on_changed(core: Core, message: InputsChanged) -> None:
    """Give back what came from a text that was written to while a device had it mapped."""
    run = core.run
    if run is None or run.job.id != message.job or run.phase == "adrift":
        return
    job = run.job
    gave = message.counters.round > job.began or message.device in job.survivors()
    if gave:
        _give_back(core, run, message.device, message.what)
    else:  # it was told of a change that the job has gone back for already, or had only begun
        inputs.keep_out(core, run, message.device, message.what)
        _without(core, run, message.device, f"{message.device}: {message.what}")


def _give_back(core: Core, run: Run, device: str, what: str) -> None:
    """What ``device`` gave may come from another text: nothing since the last good state counts."""
    job = run.job
    inputs.keep_out(core, run, device, what)
    # Back to a checkpoint that is known to be right: the newest may be of the wrong text already. One that
    # was checked is not, whatever happens next. (D-data-005)
    target = inputs.trusted(job)
    cause = f"the text changed while it was read on {node_of(device)}: {what}"
    _set_aside(core, run, target.counters.step)
    recovery.distrust(core, run, Finding(cause, (node_of(device),), target, "data-changed"))


def _set_aside(core: Core, run: Run, step: int) -> None:
    """Nobody is to take a checkpoint for good that may come from another text."""
    doubtful = [kept.directory for kept in run.job.kept if kept.counters.step > step and not kept.checked]
    doubtful += [directory.removesuffix(".partial") for directory in sorted(run.completing)]
    for directory in doubtful:
        core.outbox.append(SetAside(directory))


def leaves_unchecked(core: Core, run: Run, kept: KeptCheckpoint | None = None) -> bool:
    """Whether nobody who lives can say any more that ``kept``, or else the checkpoint from which the job goes
    on, comes of the right text; then it goes back behind that.
    """
    job = run.job
    if run.restarted and core.now < core.started_at + core.config.grace_s:
        return False  # not all of them may have said Hello
    # The dead are not waited for, which would lose steps at every loss; where all who read have died, the
    # steps are lost anyway. (D-data-007)
    kept = kept or inputs.doubtful_base(job)
    if kept is None or kept.checked or not job.inputs or inputs.witnessed(core, run, kept):
        return False
    cause = f"nobody is left who could say that the text was the right one up to step {kept.counters.step}"
    recovery.distrust(core, run, Finding(cause, (), inputs.trusted(job), "data-changed"))
    return True


def on_moved(core: Core, message: InputsMoved) -> None:
    """Another file lies where devices have opened theirs: that is said once, since they all see it."""
    run = core.run
    if run is None or run.job.id != message.job or run.moved.get(message.path, "back") == message.now:
        return
    run.moved[message.path] = message.now
    words = {
        "other": "was replaced, or has grown: devices that run still read what they have opened, and a node "
        "that joins is kept out until that is back",
        "gone": "is gone: devices that run still read what they have opened, and a node that joins is kept "
        "out until it is back",
        "back": "is back, with what the job reads",
    }
    level: Level = "info" if message.now == "back" else "warn"
    text = f"{run.job.id}: {message.path} {words[message.now]}"
    story = (f"job:{run.job.id}", f"node:{node_of(message.device)}")
    core.announce(text, FileMoved(run.job.id, message.path, message.now), story, level=level)


# ---------------------------------------------------------------------- too few have it


def ends(core: Core, run: Run, needed: int) -> bool:
    """Whether the job is over, as too few nodes have its text and nobody puts it back; ``needed``: so many
    would do.
    """
    job = run.job
    if not run.kept_out or not _lacks(core, run, max(1, needed)):
        run.lacking_since = None
        return False
    begins = job.deployed_at is None
    run.lacking_since = core.now if run.lacking_since is None else run.lacking_since
    # The one who replaced a text often puts it back at once; a job that waited for ever in a script would
    # be found by nobody. (D-data-008)
    if not begins and core.now < run.lacking_since + inputs.PATIENCE_S:
        return False
    if begins and not job.inputs and run.unread is not None:
        first = run.unread
        jobs.fail(core, job, f"{first.device}: {first.error}", first.hint, first.cause or "data-unreadable")
        return True
    jobs.fail(core, job, f"{inputs.kept_words(run)}; {_where(job)}", _PUT_BACK, "data-changed")
    return True


def _where(job: JobRecord) -> str:
    given_back = (
        f"{count(job.steps_lost, 'step')} {noun(job.steps_lost, 'was')} given back; "
        if job.steps_lost
        else ""
    )
    return f"{given_back}{inputs.good(job)}"


def _lacks(core: Core, run: Run, needed: int) -> bool:
    """Whether those who are kept out are what is missing."""
    if run.phase != "off" and run.job.state != "waiting":
        return False
    usable = len(core.candidates(run.job))
    present = [name for name in run.kept_out if name not in core.state.drained and _present(core, name)]
    return usable < needed <= usable + len(present)


def _present(core: Core, name: str) -> bool:
    node = core.members.nodes.get(name)
    return node is not None and node.present and not node.notice
