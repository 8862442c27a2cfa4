"""What users ask: submit, pause, resume, cancel, checkpoint, delete, drain, forget, kill. Every act is
audited.

Owns the answers to them; what follows from an accepted act is ``steer``'s.
"""

from __future__ import annotations

from typing import assert_never, get_args

from oobleckd.core import ending, jobs, lastcopy, room, view
from oobleckd.core.context import Core
from oobleckd.core.entries import (
    InputsFixed,
    JobDeleted,
    JobStateChanged,
    JobSubmitted,
    NodeDrained,
    NodeForgotten,
    PauseAsked,
)
from oobleckd.core.events import Asked, Reply
from oobleckd.core.membership import Node
from oobleckd.core.state import JobRecord, KeptCheckpoint
from oobleckd.protocol.agentmessages import Inject
from oobleckd.protocol.changes import Act, Audited, Level
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import check_job, reads_the_same
from oobleckd.protocol.jobtable import JobError
from oobleckd.protocol.parts import AT_A_POINT, Counters, Point
from oobleckd.protocol.requests import (
    Accepted,
    Control,
    Delete,
    Denied,
    Drain,
    Forget,
    Kill,
    Request,
    Response,
    Submit,
)
from oobleckd.protocol.spikes import resumed
from oobleckd.protocol.traits import COMPILER_HINT, lacking
from oobleckd.words import being, count, short

_ENDING = ("sigstop", "net-drop", "slow")
_OF_NODES = ("sigkill", "sigterm", "sigstop", "net-drop", "agent-only", "host")
_SLOW = 3.0  # times as long, where nobody says how slow


def on_asked(core: Core, event: Asked) -> None:
    """Answer a user."""
    core.outbox.append(Reply(event.ticket, _answer(core, event.request)))


def _answer(core: Core, request: Request) -> Response:
    match request:
        case Submit():
            return _submit(core, request)
        case Control():
            return _control(core, request)
        case Delete():
            return _delete(core, request)
        case Drain():
            return _drain(core, request)
        case Forget():
            return _forget(core, request)
        case Kill():
            return _kill(core, request)
        case _:
            raise TypeError(f"no such request: {request!r}")


def _audit(core: Core, text: str, said: Audited, *, level: Level = "info") -> None:
    story = [f"job:{said.job}"] if said.job else [f"node:{name}" for name in said.nodes]
    core.announce(f"{said.who or 'someone'}: {text}", said, story, level=level)


# ---------------------------------------------------------------------- jobs


def _submit(core: Core, request: Submit) -> Response:
    try:
        check_job(request.job)
    except JobError as error:
        return Denied("invalid", str(error), error.hint)
    if request.job.train.compile and (denied := _lacking_a_compiler(core)):
        return denied
    start = _start(core, request)
    if isinstance(start, Denied):
        return start
    source, counters = start
    job_id = request.folder or f"{request.job.name}-{core.state.next_number}"
    assert job_id not in core.state.jobs, f"a second job {job_id}"
    reason, cause = jobs.queue_reason(core)
    inputs = _inputs(core, request, source)
    folder = request.folder
    core.record(
        JobSubmitted(job_id, request.job, source, counters, core.now, knows_on_nan=True, folder=folder)
    )
    if inputs:
        core.record(InputsFixed(job_id, inputs, core.now))
    resumed = source if request.resume else ""
    said = Audited(request.who, "submit", job_id, resumed=resumed, as_named=bool(resumed) and not inputs)
    _audit(core, f"submitted {job_id}{_whence(said)}", said)
    jobs.start_next(core)
    job = core.state.jobs[job_id]
    if job.state != "queued":
        first = ": its data is prepared first" if job.state == "preparing" else ""
        return Accepted(job_id, f"{job_id} starts now{first}")
    core.record(JobStateChanged(job_id, "queued", reason, core.now, cause))
    return Accepted(job_id, f"{job_id} is queued: {reason}")


def _lacking_a_compiler(core: Core) -> Denied | None:
    """Why nodes that are here could not train a job that compiles."""
    nodes = {name: node.no_compiler for name, node in core.members.nodes.items() if node.alive}
    problem = lacking(nodes, core.state.drained)
    return Denied("invalid", problem, COMPILER_HINT) if problem else None


def _start(core: Core, request: Submit) -> tuple[str, Counters] | Denied:
    """Where the state comes from, and the counters to begin at."""
    if not request.resume:
        return "init", Counters()
    for job in reversed(core.state.jobs.values()):
        named = not job.deleted and job.spec.name == request.job.name
        if job.checkpoint and request.resume == "latest" and named:
            kept = _newest(job)
            return kept.directory, resumed(request.job, kept.counters)
        if job.checkpoint and job.checkpoint == request.resume:
            return job.checkpoint, resumed(request.job, job.checkpoint_counters)
    if request.resume == "latest":
        return Denied(
            "invalid",
            f"no job named {request.job.name} has a checkpoint",
            "submit without --resume, or name a checkpoint folder",
        )
    if request.counters is None:
        return Denied(
            "invalid",
            f"{request.resume}: no readable manifest.json",
            "name a complete checkpoint folder, such as .../step-00000100",
        )
    return request.resume, resumed(request.job, request.counters)


def latest(core: Core, name: str) -> str:
    """The folder that "latest" means for a job of that name; "" where there is none."""
    found = (job for job in reversed(core.state.shown) if job.checkpoint and job.spec.name == name)
    return next((_newest(job).directory for job in found), "")


def _newest(job: JobRecord) -> KeptCheckpoint:
    """The newest checkpoint of which it is known that its text was right, if there is one: it may have
    changed just before the job ended.
    """
    checked = [kept for kept in job.kept if kept.checked]
    return checked[-1] if checked else KeptCheckpoint(job.checkpoint, job.checkpoint_counters)


def _inputs(core: Core, request: Submit, source: str) -> Inputs:
    """What the state to start from was made from, where the job is to read the same."""
    if not request.resume:
        return ()
    for job in reversed(core.state.jobs.values()):
        if job.inputs and any(kept.directory == source for kept in job.kept):
            return job.inputs if reads_the_same(job.spec, request.job) else ()
    return request.inputs


def _whence(said: Audited) -> str:
    if not said.resumed:
        return ""
    on = "; on the data that it names now, whatever that checkpoint was made from" if said.as_named else ""
    return f" from {said.resumed}{on}"


def _control(core: Core, request: Control) -> Response:
    job = core.state.jobs.get(request.job)
    if job is None or job.deleted:
        return Denied("not-found", f"no job {request.job}", "oobleckctl get jobs lists them")
    problem, hint = _refusal(job, request.act)
    if not problem and request.act == "checkpoint":
        problem, hint = room.refusal(core, job)
    if problem:
        return Denied("conflict", f"{job.id} {being(job.state)}: {problem}", hint)
    without = ", without a checkpoint" if request.discard and request.act == "cancel" else ""
    _audit(core, f"{request.act} {job.id}{without}", Audited(request.who, request.act, job.id))
    match request.act:
        case "cancel":
            message = ending.cancel(core, job, discard=request.discard)
        case "pause":
            core.record(PauseAsked(job.id, paused=True))
            message = f"{job.id} stops after the present step"
        case "resume":
            core.record(PauseAsked(job.id, paused=False))
            if job.state == "paused":
                core.move(job, "unhold")
            message = f"{job.id} goes on"
        case "checkpoint":
            assert core.run is not None
            core.run.want_checkpoint = job.counters.step
            core.run.trouble.retry_at = core.now
            message = f"{job.id} writes a checkpoint after the present step"
        case _:
            assert_never(request.act)
    return Accepted(job.id, message)


def _delete(core: Core, request: Delete) -> Response:
    job = core.state.jobs.get(request.job)
    if job is None or job.deleted:
        return Denied("not-found", f"no job {request.job}", "oobleckctl get jobs lists them")
    if not job.final:
        hint = f"`oobleckctl cancel {job.id} --wait` ends it first"
        return Denied("conflict", f"{job.id} {being(job.state)}: only what is over is deleted", hint)
    core.record(JobDeleted(job.id, core.now))
    _audit(core, f"deleted {job.id}", Audited(request.who, "delete", job.id))
    kept = f"; its newest checkpoint stays: {_newest(job).directory}" if job.checkpoint else ""
    return Accepted(job.id, f"{job.id} is deleted{kept}")


def _refusal(job: JobRecord, act: str) -> tuple[str, str]:
    """Why ``act`` makes no sense now, and what does; empty if it does."""
    if job.final or (job.ending and act in {"pause", "resume"}):
        over = "it is over" if job.final else "it was cancelled, and ends"
        return over, _anew(job) if job.final else f"`oobleckctl cancel {job.id} --discard` ends it at once"
    if act == "pause" and job.paused:
        return "it stands still already", f"`oobleckctl resume {job.id}` lets it go on"
    if act == "pause" and job.layout is None:
        return "it does not train yet", f"`oobleckctl cancel {job.id}` ends it instead"
    if act == "resume" and not job.paused:
        return "it is not paused", f"`oobleckctl describe job {job.id}` says what it waits for"
    if act == "checkpoint" and (job.paused or job.layout is None or job.state == "waiting"):
        return (
            "a checkpoint is written between two steps, and it makes none now",
            "ask again when it is running",
        )
    return "", ""


def _anew(job: JobRecord) -> str:
    """What is possible with a job that is over."""
    if not job.checkpoint:
        return "submit it anew: it has no checkpoint to start from"
    kept = _newest(job)  # by its folder: "latest" may be another job's of that name
    more = ", and more train.steps" if kept.counters.step >= job.spec.train.steps else ""
    return f"submit it anew; with --resume {kept.directory}{more} it goes on from step {kept.counters.step}"


# ---------------------------------------------------------------------- nodes


def _drain(core: Core, request: Drain) -> Response:
    name, drained = request.node, request.node in core.state.drained
    if name not in core.members.nodes and not drained:
        return Denied("not-found", f"no node {name}", "oobleckctl get nodes lists them")
    if drained != request.undo:
        problem = "is not drained" if request.undo else "is drained already"
        return Denied("conflict", f"{name} {problem}", "`oobleckctl get nodes` shows the state of each")
    act: Act = "undrain" if request.undo else "drain"
    core.record(NodeDrained(name, request.reason, request.undo, core.now, "operator"))
    said = Audited(request.who, act, nodes=(name,), reason=request.reason)
    _audit(core, f"{act} {name} {request.reason}".strip(), said)
    if request.undo:
        core.joined_at = core.now
        return Accepted(name, f"{name} may be used again")
    if view.in_layout(core, name):
        return Accepted(name, f"{name} leaves the plan after a coming step")
    return Accepted(name, f"{name} is kept out of plans")


def _forget(core: Core, request: Forget) -> Response:
    name, node = request.node, core.members.nodes.get(request.node)
    if name not in core.state.nodes and (node is None or node.forgotten) and name not in core.state.drained:
        return Denied("not-found", f"no node {name}", "oobleckctl get nodes lists them")
    if node is not None and node.alive:
        hint = "end its worker first: a node that leaves in order is not expected back"
        return Denied("conflict", f"{name} is here", hint)
    if view.in_layout(core, name):
        hint = "it is when the job has gone on without it; `oobleckctl describe job` says what that waits for"
        return Denied("conflict", f"{name} has a place in the plan that is kept for it", hint)
    core.record(NodeForgotten(name, core.now))
    if node is not None:
        node.forgotten = True
    _audit(core, f"forgot {name}", Audited(request.who, "forget", nodes=(name,)))
    return Accepted(name, f"{name} is not expected any more")


def _kill(core: Core, request: Kill) -> Response:
    node = core.members.nodes.get(request.node)
    if request.how in lastcopy.ENDS and not request.at and lastcopy.end_wait(core, request.node):
        said = Audited(request.who, "end-wait", nodes=(request.node,))
        _audit(core, f"waits for {request.node} no longer", said, level="warn")
        if node is None or not (core.config.allow_injection and node.alive and node.connected):
            return Accepted(request.node, f"{request.node} is waited for no longer")
    if not core.config.allow_injection:
        return Denied("forbidden", "failure injection is off", "start the daemon with allow_injection = true")
    if node is None:
        return Denied("not-found", f"no node {request.node}", "oobleckctl get nodes lists them")
    if not (node.alive and node.connected):
        hint = f"`oobleckctl describe node {request.node}` says since when and why"
        return Denied("conflict", f"{request.node} is not connected", hint)
    nonsense = _nonsense(request, node)
    if nonsense is not None:
        return nonsense
    times = request.times if request.how != "slow" or request.times > 1 else _SLOW
    victims = [node] if request.how != "host" else _on_host(core, node.host)
    names = tuple(victim.name for victim in victims)
    which = f" of device {request.device}" if request.how != "device" else f" {request.device}"
    at = which if request.device else ""
    at += f" at {request.at}" if request.at else ""
    at += f", {short(times)} times as long" if request.how == "slow" else ""
    said = Audited(request.who, "kill", nodes=names, how=request.how)
    _audit(core, f"kill {', '.join(names)}: {request.how}{at}", said, level="warn")
    for victim in victims:
        numbered = victim.devices[request.device :][:1]
        device = numbered[0].device if numbered else ""
        core.tell(victim.name, Inject(request.how, device, request.at, request.round, request.seconds, times))
    return Accepted(request.node, f"fault {request.how} is on its way to {', '.join(names)}")


def _no_such_device(request: Kill, node: Node) -> Denied | None:
    if request.how in _OF_NODES:
        return Denied("invalid", f"{request.how} is not of one device", f"leave out device {request.device}")
    if request.device < len(node.devices):
        return None
    has = f"{node.name} has {count(len(node.devices), 'device')}, numbered from 0"
    return Denied("invalid", f"no device {request.device}", has)


def _nonsense(request: Kill, node: Node) -> Denied | None:
    """Why a fault would not strike as it was asked for, if it would not."""
    if request.seconds and request.how not in _ENDING:
        return Denied("invalid", f"{request.how} does not end after a time", f"{', '.join(_ENDING)} do")
    if request.at and request.at not in get_args(Point):
        return Denied("invalid", f"no fault point {request.at!r}", f"there are: {', '.join(get_args(Point))}")
    if request.at and request.how not in AT_A_POINT:
        return Denied(
            "invalid", f"{request.how} does not wait for a fault point", f"{' and '.join(AT_A_POINT)} do"
        )
    if request.times != 1 and request.how != "slow":
        return Denied("invalid", f"{request.how} is not done several times", "slow is: --how slow=3")
    return _no_such_device(request, node) if request.device else None


def _on_host(core: Core, host: str) -> list[Node]:
    return [
        node for _, node in sorted(core.members.nodes.items())
        if node.alive and node.connected and node.host == host
    ]  # fmt: skip
