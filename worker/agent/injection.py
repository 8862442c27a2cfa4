"""Failures on demand, at the agent: each is the real thing, brought about from inside the node.

Owns what every ``how`` does (docs/drills.md). Whether it is allowed at all was decided
by the daemon. Where a device has to do it (a fault point, a hang), the message is passed on.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from typing import assert_never

from oobleckd.protocol.agentmessages import Inject
from oobleckd.worker.agent.daemon_link import Uplink
from oobleckd.worker.processes.children import Child

_log = logging.getLogger(__name__)


def inject(
    message: Inject,
    children: Sequence[Child],
    uplink: Uplink,
    *,
    pass_on: Callable[[Child], None],
    leave: Callable[[str], None],
) -> None:
    """Do it, now. ``children`` are the node's devices; ``pass_on`` gives the message to one of them."""
    _log.warning("failure injection: %s %s %s", message.how, message.device, message.at)
    targets = [child for child in children if message.device in {"", child.device}]
    if message.at or message.how == "hang":
        _each(targets, pass_on)
        return
    match message.how:
        case "sigkill" | "host":
            _each(children, Child.kill)
            os.kill(os.getpid(), signal.SIGKILL)
        case "agent-only":
            os.kill(os.getpid(), signal.SIGKILL)
        case "device":
            _each(targets[:1], Child.kill)
        case "sigstop":
            _stop_all(children, message.seconds)
        case "flip-weight" | "flip-moment" | "flip-sum" | "flip-mean" | "slow":
            _each(targets[:1], pass_on)
        case "net-drop":
            uplink.block(message.seconds)
            _each(children, pass_on)
        case "sigterm":
            leave("sigterm was injected")
        case _:
            assert_never(message.how)


def _each(children: Sequence[Child], act: Callable[[Child], None]) -> None:
    for child in children:
        act(child)


def _stop_all(children: Sequence[Child], seconds: float) -> None:
    """Stop all processes of the node; after ``seconds``, if any, somebody else wakes them: they cannot."""
    pids = [str(pid) for pid in (os.getpid(), *(child.process.pid for child in children))]
    if seconds:
        script = 'sleep "$0"; exec kill -CONT "$@"'
        subprocess.Popen(["/bin/sh", "-c", script, str(seconds), *pids], start_new_session=True)
    for child in children:
        child.signal(signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP)
