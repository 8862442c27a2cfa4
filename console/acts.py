"""What the console may do to a cluster: each act with its oobleckctl command, why it is refused, and how it is done.

Acts are data until somebody has confirmed them. Owns no dialog (``screens.confirm``).
"""

from __future__ import annotations

import shlex
from typing import Literal, assert_never, get_args

import msgspec

from console.model import View
from oobleckd.client import Client
from oobleckd.protocol.parts import How

Verb = Literal["drain", "undrain", "kill", "pause", "resume", "checkpoint", "cancel"]
HOWS: tuple[How, ...] = get_args(How)
ON_NODES = frozenset({"drain", "undrain", "kill"})


class Act(msgspec.Struct, frozen=True):
    """``verb`` on ``names``: nodes, or the one job. ``how`` nodes are killed."""

    verb: Verb
    names: tuple[str, ...]
    how: How = "sigkill"

    @property
    def command(self) -> str:
        """The same as a command line."""
        names = " ".join(map(shlex.quote, self.names))
        if self.verb == "kill":
            return f"oobleckctl kill-node {names} --how {self.how}"
        return "; ".join(f"oobleckctl {self.verb} {shlex.quote(name)}" for name in self.names)

    @property
    def question(self) -> str:
        """What it is, for who has to confirm it."""
        names = ", ".join(self.names)
        return f"{self.verb} {names} by {self.how}" if self.verb == "kill" else f"{self.verb} {names}"


def refusal(act: Act, view: View, *, read_only: bool) -> str:
    """Why it cannot be done here and now; "" where it can."""
    if read_only:
        return "this console was started with --read-only"
    if view.tape is not None:
        return "this is the past; esc comes back to now"
    if view.link != "live":
        return "the daemon does not answer"
    if not act.names:
        return "nothing is chosen"
    if act.verb == "kill" and (view.status is None or not view.status.allow_injection):
        return "the daemon does not allow failure injection: start it with allow_injection = true"
    return ""


def perform(client: Client, act: Act) -> str:
    """Do it, and say what the daemon said. Raises what ``Client`` raises."""
    return "; ".join(dict.fromkeys(filter(None, (_one(client, act, name) for name in act.names)))) or "done"


def _one(client: Client, act: Act, name: str) -> str:
    match act.verb:
        case "drain":
            return client.drain(name).message
        case "undrain":
            return client.undrain(name).message
        case "kill":
            return client.kill(name, act.how).message
        case "pause" | "resume" | "checkpoint" | "cancel":
            return client.control(name, act.verb).message
        case _:
            assert_never(act.verb)
