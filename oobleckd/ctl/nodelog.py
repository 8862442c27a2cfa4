"""Asks the daemon for the newest lines of a node's log: for ``logs``, where the log is not on this machine.

Owns what is asked; how lines are shown is ``logs``'.
"""

from __future__ import annotations

from http import HTTPStatus

from oobleckd.client import Client
from oobleckd.ctl.connect import translated
from oobleckd.ctl.output import NOT_FOUND, USAGE, fail, note
from oobleckd.protocol.nodeviews import NodeLogView
from oobleckd.unixhttp import ApiProblem, Unreachable

MAX_LINES = 1000


def fetch(client: Client, node: str, num_lines: int, *, follow: bool) -> NodeLogView | None:
    """What the agent of ``node`` tells; None where no daemon answers. Ends the command where the daemon says
    no, and where the log is to be followed, which it cannot be from here.
    """
    with translated():
        try:
            found = client.node_log(node, min(num_lines, MAX_LINES))
        except Unreachable:
            return None
        except ApiProblem as refused:
            if refused.status != HTTPStatus.NOT_FOUND:
                raise
            fail(f"no log of {node}: no node and no job is called so", refused.hint, NOT_FOUND)
    if follow:
        problem = f"the log of {node} is not on this machine, and cannot be followed from here"
        fail(problem, f"follow it on its machine: journalctl -fu oobleck-worker@{node}", USAGE)
    if not found.complete:
        note(f"lines of the agent alone: what devices print is in the log of {node}'s service")
    return found
