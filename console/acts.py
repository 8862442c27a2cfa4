"""What the console may do to a cluster: each act with its oobleckctl command, why it is refused, how it is
done and what came of it.

Acts are data until somebody has confirmed them. Owns no dialog (``screens.prompt``).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Literal, NamedTuple, assert_never, get_args

import msgspec

from oobleckd.client import Client
from oobleckd.console import bundle
from oobleckd.console.model import View
from oobleckd.protocol.parts import How
from oobleckd.unixhttp import ApiProblem, ClientError

Verb = Literal["drain", "undrain", "kill", "pause", "resume", "checkpoint", "cancel"]
HOWS: tuple[How, ...] = get_args(How)
ON_NODES = frozenset({"drain", "undrain", "kill"})
# Why nobody was reached at all. Whatever else ends without an answer may have been done.
_NOT_SENT = (FileNotFoundError, ConnectionRefusedError, PermissionError)
_PROGRAM = re.compile(r"(^|; )oobleckctl ")


class ActOutcome(NamedTuple):
    """What came of something, in a sentence, and whether that is bad."""

    said: str
    bad: bool = False


class ConsoleAct(msgspec.Struct, frozen=True):
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


def refusal(act: ConsoleAct, view: View, *, read_only: bool) -> str:
    """Why it cannot be done here and now; "" where it can."""
    if read_only:
        return "this console was started with --read-only"
    if view.link == "replay":
        return "this is the past; esc comes back to now"
    if view.link != "live":
        return "the daemon does not answer"
    if not act.names:
        return "nothing is chosen"
    if act.verb == "kill" and (view.status is None or not view.status.allow_injection):
        return "the daemon does not allow failure injection: start it with allow_injection = true"
    return ""


def to_socket(command: str, socket: str) -> str:
    """The same commands, to the daemon on ``socket``; to the one that oobleckctl finds by itself where that
    is "".
    """
    if not socket:
        return command
    return _PROGRAM.sub(lambda found: f"{found[0]}--socket {shlex.quote(socket)} ", command)


def perform(client: Client, act: ConsoleAct) -> ActOutcome:
    """Do it to each of its names, whatever becomes of the others, and say what the daemon said; where some
    went wrong, of whom.
    """
    found = {name: _tried(client, act, name) for name in act.names}
    names: dict[str, list[str]] = {}
    for name, outcome in found.items():
        names.setdefault(outcome.said, []).append(name)
    bad = any(outcome.bad for outcome in found.values())
    if bad and len(names) > 1:
        return ActOutcome("; ".join(f"{', '.join(whose)}: {said}" for said, whose in names.items()), bad)
    return ActOutcome("; ".join(names), bad)


def export(client: Client, incident: str) -> ActOutcome:
    """Write an incident into the current folder, over no file that is there."""
    path = Path(f"{incident}.json").absolute()
    try:
        written = bundle.write(path, client.bundle(incident))
    except ClientError as error:
        return ActOutcome(f"not written: {error.problem}", bad=True)
    except OSError as error:
        return ActOutcome(f"{path} cannot be written: {error.strerror}", bad=True)
    return ActOutcome(f"written: oobleck-console --bundle {written}")


def _tried(client: Client, act: ConsoleAct, name: str) -> ActOutcome:
    try:
        return ActOutcome(_one(client, act, name) or "done")
    except ClientError as error:
        # What was sent and not answered may have been done: who reads "not done" does it again.
        # (D-console-015)
        if isinstance(error, ApiProblem) or isinstance(error.__cause__, _NOT_SENT):
            return ActOutcome(f"not done: {error.problem}. {error.hint}".rstrip(), bad=True)
        return ActOutcome(
            f"not known whether it was done: {error.problem}; look before you do it again", bad=True
        )


def _one(client: Client, act: ConsoleAct, name: str) -> str:
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
