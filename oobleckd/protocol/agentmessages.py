"""Messages between an agent and the daemon: who is there, who has gone, what is to be done to processes.

Owns the vocabulary only; what follows of it is the core's and the agent's.
"""

from __future__ import annotations

import msgspec

from oobleckd.protocol.deaths import Death
from oobleckd.protocol.message import Message
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.protocol.parts import (
    CardReport,
    DatagramSession,
    DeviceInfo,
    How,
    Notice,
    RefusalCause,
    Spare,
)


class Hello(Message, frozen=True):
    """First message of an agent on every connection, and whenever its devices' incarnations change.

    ``incarnation`` is new whenever the node's devices were started anew: all incarnations before it are over.
    A device whose place the spare has taken shows by its ``incarnation`` alone. Devices still starting are
    not listed; a node is usable when ``ready``. ``zone``: what the node fails together with, where its user
    said so. ``notice``: it is about to be ended, and wants to be out of the plan before; said again in every
    Hello from then on. The agent speaks protocols ``oldest`` (0: no other) to ``protocol``. ``prepares``: it
    knows ``PrepareData``.
    """

    protocol: int
    node: str
    incarnation: str
    host: str
    ready: bool
    devices: tuple[DeviceInfo, ...]
    spare: Spare | None = None
    zone: str = ""
    notice: Notice | None = None
    oldest: int = 0
    prepares: bool = False


class Heartbeat(Message, frozen=True, tag="Beat"):
    """Sign of life of an agent, every ``Welcome.heartbeat_s`` seconds."""

    incarnation: str


class DeviceLost(Message, frozen=True):
    """The agent saw its device process exit (``evidence``: what it saw, e.g. "signal 9").

    With ``spare`` the node lives on: its warm spare takes the place, and a Hello follows once it is up.
    Without, all devices of the node start anew, under another incarnation. ``death``: why, where the device
    said so, or the kernel did.
    """

    incarnation: str
    device: str
    evidence: str
    spare: bool = False
    death: Death | None = None


class DeviceStopped(Message, frozen=True):
    """The agent sees that its device process ``device_incarnation`` does not run for ``stopped_s`` seconds (a
    signal, a frozen cgroup: ``evidence``); said again every second until it goes on or is ended. The daemon
    knows whether it can be spared, so it says what follows: ``EndStopped`` or ``Wake``.
    """

    incarnation: str
    device: str
    device_incarnation: str = msgspec.field(name="life")
    evidence: str
    stopped_s: float


class DeviceAwake(Message, frozen=True):
    """A device of which ``DeviceStopped`` was said goes on, after ``stopped_s`` seconds in all."""

    incarnation: str
    device: str
    device_incarnation: str = msgspec.field(name="life")
    stopped_s: float


class FiguresTold(Message, frozen=True):
    """What devices of a node and their cards say of themselves, every ``Welcome.figures_s`` seconds, and the
    last errors that the cards reported, newest last. For who watches: nothing is decided by it, and it is no
    sign of life.
    """

    incarnation: str
    figures: tuple[DeviceFigures, ...]
    reports: tuple[CardReport, ...] = ()


class LogTold(Message, frozen=True):
    """The answer to ``TellLog``, by its ``ticket``: the newest lines, oldest first. ``complete``: with what
    devices print, and not those of the agent alone.
    """

    ticket: str
    lines: tuple[str, ...]
    complete: bool = False


class Goodbye(Message, frozen=True):
    """The agent leaves in order (SIGTERM). ``overdue``: its notice's time is up, and it was not let go."""

    incarnation: str
    reason: str
    overdue: bool = False


class Welcome(Message, frozen=True):
    """Accepted: ``protocol`` is spoken from now on. ``daemon`` is the incarnation of the daemon.

    ``incarnations``: the device incarnations of the Hello that this answers. Until an incarnation is among
    them, what comes for its device is meant for the incarnation before it, and the agent drops it.
    ``datagrams``: how the node may send heartbeats while it is idle, until the next Welcome or the end of the
    connection; None: over the connection alone. ``figures_s``: how often it is to tell of its devices, in
    seconds (0: never, as a daemon that does not know ``FiguresTold``). ``artifacts``: the daemon keeps what
    nodes compile, and sends it to others.
    """

    protocol: int
    daemon: str
    heartbeat_s: float = msgspec.field(name="beat_s")
    lease_s: float
    incarnations: tuple[str, ...] = msgspec.field(default=(), name="lives")
    datagrams: DatagramSession | None = None
    figures_s: float = 0.0
    artifacts: bool = False


class Refused(Message, frozen=True):
    """Not accepted: why, and what to do. The agent prints it and exits. ``cause``: why, for programs."""

    reason: str
    hint: str
    cause: RefusalCause = ""


class Dismiss(Message, frozen=True):
    """To an agent that gave ``Hello.notice``: nothing of this node is needed any more, so it may leave."""


class EndStopped(Message, frozen=True):
    """To an agent: end the stopped process of ``device``, if ``incarnation`` is still its incarnation."""

    device: str
    incarnation: str = msgspec.field(name="life")


class Wake(Message, frozen=True):
    """To an agent: send SIGCONT to the stopped process of ``device``: it is waited for, as nobody else has
    what it holds.
    """

    device: str
    incarnation: str = msgspec.field(name="life")


class TellLog(Message, frozen=True):
    """To an agent: tell the newest ``num_lines`` lines of the node's log; answered with ``LogTold``."""

    ticket: str
    num_lines: int


class Ack(Message, frozen=True):
    """Every ``StepDone`` of ``job`` with a round up to ``round``, and checkpoint parts up to it, are
    journaled.
    """

    job: str
    round: int


class Inject(Message, frozen=True):
    """Failure injection.

    ``how``: sigkill (agent and devices), sigterm (an orderly leave), sigstop (agent and devices), hang (a
    device process, its interpreter locked), net-drop (nothing of the node leaves or arrives), agent-only and
    device (SIGKILL of one process), host (sigkill, told to every node of a host). ``at`` names a fault point
    of the device process instead of "now" (docs/drills.md lists them), optionally at a given ``round``.
    flip-weight, flip-moment, flip-sum and flip-mean: one bit of a weight, an optimizer moment, a gradient sum
    or a mean gradient of a device changes. slow: a device takes ``times`` as long for every layer.
    ``seconds``: sigstop, net-drop and slow end after so long (0: never).
    """

    how: How
    device: str = ""
    at: str = ""
    round: int = -1
    seconds: float = 0.0
    times: float = 1.0
