"""Has one node after the other prepare the data of the active job, until one has.

Owns who is asked, and what follows of the answers. In the journal are the phase (a state of the job) and the
folders; who is at it, and how far, is in memory: a daemon that starts hears it from the agents. How tokens
are made is ``oobleckd.prepare``'s, who starts the process for that ``oobleckd.worker.processes``'s.
"""

from __future__ import annotations

from typing import Literal

from oobleckd.core import jobs
from oobleckd.core.context import Core
from oobleckd.core.entries import DataPrepared
from oobleckd.core.membership import Node
from oobleckd.core.run import Run
from oobleckd.protocol.changes import PreparingBegan, PreparingEnded
from oobleckd.protocol.datamessages import (
    PrepareData,
    PrepareDone,
    PrepareFailed,
    Preparing,
    StopPreparing,
)
from oobleckd.protocol.jobviews import PreparingView
from oobleckd.protocol.parts import PreparePhase
from oobleckd.words import count, seconds, size

_MAX_DEATHS = 5
"""Of processes, on all nodes: what ends them then is most likely the text."""
_DOES: dict[PreparePhase, str] = {
    "look": "looks at", "read": "reads", "tokenize": "tokenizes", "pack": "packs", "join": "writes",
}  # fmt: skip


def steer(core: Core, run: Run) -> None:
    """See to it that a node is at it, if one can be."""
    at = run.preparation
    if at.node and not _may(core, core.members.nodes.get(at.node)):
        _pass_on(core, run, "node-gone", f"{at.node} is lost, drained or about to end")
    if at.node or _may_be_at_it(core, run):
        return
    able = [name for name, node in sorted(core.members.nodes.items()) if node.connected and _may(core, node)]
    left = [name for name in able if name not in at.refused]
    if left:
        _begin(core, run, min(left, key=lambda name: at.deaths[name]))
    elif not able or at.able:
        whom = f"{at.able} or another node" if at.able else "a node"
        reason = f"waits for {whom} to prepare its data; see oobleckctl get nodes"
        core.explain(run.job, reason, "nodes-not-ready")
    elif core.now >= core.joined_at + core.config.batch_s:
        node, why = next(iter(at.refused.items()))
        others = f"; nor can {count(len(at.refused) - 1, 'other node')}" if len(at.refused) > 1 else ""
        _fail(core, run, f"{node}: {why}{others}")


def heard(core: Core, node: str, message: Preparing | PrepareDone | PrepareFailed) -> None:
    """An agent says how far it is, or how it ended."""
    run = core.run
    at = run.preparation if run is not None and _is_of(run, message.job) else None
    if run is None or at is None:
        core.tell(node, StopPreparing(message.job))
    elif not at.node and node not in at.refused and _may(core, core.members.nodes.get(node)):
        _begin(core, run, node)  # the daemon before this one had it begin
    elif node != at.node:
        core.tell(node, StopPreparing(message.job))
    elif message.order == at.order:
        _answered(core, run, message)


def remind(core: Core, node: str, *, new: bool) -> None:
    """An agent is back, or (``new``) in another incarnation: it may have missed what it was told."""
    run = core.run
    if run is None or not _is_of(run, run.job.id):
        return
    if new:
        run.preparation.refused.pop(node, None)
    if node == run.preparation.node:
        _tell(core, run)


def view(run: Run) -> PreparingView | None:
    """Who is at it, and how far; None where nobody is."""
    at, far = run.preparation, run.preparation.far
    if not at.node:
        return None
    if far is None:
        return PreparingView(at.node, "look")
    left_s = (far.total_bytes - far.done_bytes) / far.bytes_per_s if far.bytes_per_s else 0.0
    return PreparingView(
        at.node, far.phase, far.source, far.done_bytes, far.total_bytes, far.bytes_per_s, left_s
    )


def words_of(core: Core, node: str) -> str:
    """What a node does for the active job's data, for people; "" where that is nothing."""
    run = core.run
    return f"prepares the data of {run.job.id}" if run is not None and run.preparation.node == node else ""


def words(seen: PreparingView | None) -> str:
    """The same for people."""
    if seen is None:
        return ""
    of = f" of {seen.source!r}" if seen.source else ""
    told = f"{seen.node} {_DOES[seen.phase]} the data{of}"
    if seen.total_bytes:
        told += f": {size(seen.done_bytes)} of {size(seen.total_bytes)}"
    if seen.bytes_per_s:
        told += f", {size(seen.bytes_per_s)}/s, {seconds(seen.left_s)} left"
    return told


# ---------------------------------------------------------------------- who is asked


def _is_of(run: Run, job: str) -> bool:
    return run.job.id == job and run.job.state == "preparing"


def _may(core: Core, node: Node | None) -> bool:
    """Whether it may be asked, or goes on with it, also through a short disconnection."""
    if node is None or not node.alive or not node.prepares:
        return False
    return not node.notice and node.name not in core.state.drained


def _may_be_at_it(core: Core, run: Run) -> bool:
    """Whether somebody may be, whom the daemon before this one has told: it will say so."""
    return run.restarted and core.now < core.started_at + core.config.grace_s


def _begin(core: Core, run: Run, node: str) -> None:
    at = run.preparation
    at.node, at.order, at.far = node, core.new_order(), None
    _tell(core, run)
    core.explain(run.job, "")
    text = f"{node} prepares the data of {run.job.id}"
    core.announce(text, PreparingBegan(run.job.id, node), (f"job:{run.job.id}", f"node:{node}"))


def _tell(core: Core, run: Run) -> None:
    at = run.preparation
    core.tell(at.node, PrepareData(run.job.id, run.job.spec, at.order))


# ---------------------------------------------------------------------- what it answers


def _answered(core: Core, run: Run, message: Preparing | PrepareDone | PrepareFailed) -> None:
    at, text = run.preparation, ""
    if isinstance(message, PrepareFailed):
        text = f"{message.error} ({message.hint})" if message.hint else message.error
    match message:
        case Preparing():
            at.far = message
            at.able = at.node if message.phase != "look" else at.able
        case PrepareDone():
            _done(core, run, message)
        case PrepareFailed(died=True):
            at.deaths[at.node] += 1
            if at.deaths.total() < _MAX_DEATHS:
                _pass_on(core, run, "died", text)
            else:
                _fail(core, run, f"{at.node}: {text}; that was the {_MAX_DEATHS}th time")
        # What a look finds may be of the machine: a folder that it does not see, no room, a package that it
        # lacks. What is found later is of the text. (D-daemon-028)
        case PrepareFailed(begun=False):
            at.refused[at.node] = text
            _pass_on(core, run, "refused", text)
        case PrepareFailed():
            _fail(core, run, f"{at.node}: {text}")


def _done(core: Core, run: Run, message: PrepareDone) -> None:
    job, node = run.job, run.preparation.node
    if len(message.folders) != max(1, len(job.spec.data.sources)):
        _fail(core, run, f"{node} says that it is done, and names {count(len(message.folders), 'folder')}")
        return
    core.record(DataPrepared(job.id, message.folders, core.now))
    named = ", ".join(filter(None, message.folders))
    told = PreparingEnded(job.id, node, "done", folders=message.folders)
    text = f"{node} has prepared the data of {job.id}: {named}"
    core.announce(text, told, (f"job:{job.id}", f"node:{node}"))
    jobs.stop_preparing(core, run)  # so that its agent need not say it again
    core.move(job, "prepared")


def _pass_on(core: Core, run: Run, cause: Literal["refused", "died", "node-gone"], why: str) -> None:
    """Nobody is at it any more, and another one is to be."""
    job, node = run.job, run.preparation.node
    core.tell(node, StopPreparing(job.id))
    run.preparation.node, run.preparation.far = "", None
    told = PreparingEnded(job.id, node, cause, why)
    text = f"{node} does not prepare the data of {job.id}: {why}"
    core.announce(text, told, (f"job:{job.id}", f"node:{node}"), level="warn")


def _fail(core: Core, run: Run, why: str) -> None:
    jobs.fail(core, run.job, why, "", "data-unprepared")
