"""Why a node is in its state: a sentence for people, and a cause for programs.

Owns these words. The state is ``view``'s, what a node is lost of ``membership``'s.
"""

from __future__ import annotations

from typing import NamedTuple

from oobleckd.core.context import Core
from oobleckd.core.membership import Node
from oobleckd.core.run import Run
from oobleckd.core.state import Expected
from oobleckd.protocol.nodeviews import NodeState
from oobleckd.protocol.parts import NodeCause
from oobleckd.words import count, seconds


class Why(NamedTuple):
    """One answer, said twice."""

    reason: str = ""
    cause: NodeCause = ""


class Use(NamedTuple):
    """Names of nodes that the plan in force leaves idle, that a plan may use, and that one was found to have
    no use for.
    """

    idle: frozenset[str]
    usable: frozenset[str]
    useless: frozenset[str]


def use(core: Core) -> Use:
    """What the plan in force uses: found once, as there may be thousands of nodes."""
    run = core.run
    if run is None or run.job.plan is None:
        return Use(frozenset(), frozenset(), frozenset())
    return Use(
        frozenset(run.job.plan.idle), frozenset(core.candidates(run.job)), frozenset(run.satisfied or ())
    )


def why_missing(known: Expected, *, waiting: bool) -> Why:
    """Of a node that has not said Hello in this incarnation of the daemon."""
    if waiting or not known.lost:
        return Why("not heard since the daemon's restart", "not-heard")
    return Why(known.lost, known.code)


def why(core: Core, node: Node, state: NodeState, use: Use) -> Why:
    """Of a node that is ``state``."""
    run = core.run
    if state in {"lost", "left"}:
        return Why(node.cause, node.code)
    if state in {"draining", "drained"}:
        return _drained(core, node)
    if run is not None and node.name in run.kept_out:
        return Why("; ".join(sorted(set(run.kept_out[node.name].wrong.values()))), "data-changed")
    if state == "disconnected":
        return _disconnected(core, node)
    if state == "active" and run is not None:
        return _slow(run, node)
    return _standby(run, node, use) if state == "standby" and run is not None else Why()


def _drained(core: Core, node: Node) -> Why:
    said = core.state.drained.get(node.name, "")
    if said or not node.notice:
        return Why(said, core.state.drain_causes.get(node.name, ""))
    return Why(f"{node.notice}, which ends it in {max(0.0, node.ends_at - core.now):.0f} s", "notice")


def _disconnected(core: Core, node: Node) -> Why:
    """What is missing of a node that is suspect and not more."""
    if not node.connected:
        return Why("its link closed; it may come back", "link-closed")
    silent_s = core.members.silent_s(node, core.now)
    return Why(f"silent for {seconds(silent_s)}; its lease is {seconds(node.lease.length_s)}", "silent")


def _slow(run: Run, node: Node) -> Why:
    """What is slow about a node that works."""
    slow = [
        (device.device, factor) for device in node.devices if (factor := run.paces.slow.get(device.device))
    ]
    words = "; ".join(f"{device} is slow: {factor:.1f} times its peers" for device, factor in slow)
    return Why(words, "slow") if slow else Why()


def _standby(run: Run, node: Node, use: Use) -> Why:
    """Why a node that is here has no place in the plan in force; nothing while one is being made."""
    job = run.job
    if job.plan is None:
        return Why()
    if node.name in use.idle:
        return Why(job.plan.reason, "no-place")
    num_devices = len(node.devices)
    if job.setup is not None and num_devices < job.setup.whole_node:
        wanted = job.setup.whole_node
        return Why(
            f"has {count(num_devices, 'device')}, and the plan needs {wanted} of every node",
            "too-few-devices",
        )
    if job.spec.train.compile and node.no_compiler:
        return Why(f"has {node.no_compiler}, and the job compiles (train.compile)", "no-compiler")
    if node.name not in use.usable:
        most = job.spec.resources.max_nodes or len(job.offered)
        return Why(f"the job may use {count(most, 'node')} at most", "max-nodes")
    return Why("the plan has no use for it", "no-place") if node.name in use.useless else Why()
