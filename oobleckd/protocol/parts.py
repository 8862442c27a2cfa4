"""What messages between daemon, agents and device processes are made of: plain values, none of them sent
alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from oobleckd.protocol.traits import KIND

DATAGRAM_SESSION_BYTES, DATAGRAM_KEY_BYTES = 8, 32

Outcome = Literal["applied", "skipped", "repeated", "evaluated"]
"""Of a round: ``evaluated`` it was no try at a step."""
SkipCause = Literal["", "not-finite", "loss-spike", "grad-norm"]
"""Why a step made no update, for programs. "": it made one. Its loss or a gradient was not finite
(``not-finite``), its loss far above those before it (``loss-spike``), its gradient norm beyond
``train.spike_grad_norm`` (``grad-norm``).
"""
SPIKES: tuple[SkipCause, ...] = ("loss-spike", "grad-norm")
JobCause = Literal[
    "",
    "job-ahead", "no-nodes", "nodes-not-ready", "too-few-nodes", "too-few-for-f", "no-plan",
    "last-copy", "checkpoint-unwritten",
    "not-finite", "data-changed", "data-unreadable", "out-of-memory", "checkpoint-damaged", "same-error",
    "device-refused", "data-unprepared", "spikes",
]  # fmt: skip
"""Why a job waits, or has failed, for programs. "": for no reason, or one that only the sentence says.

It waits for another job to end (``job-ahead``), for any node (``no-nodes``), for those that are here to be
ready (``nodes-not-ready``), for as many as hold the model (``too-few-nodes``), or its f + 1 copies
(``too-few-for-f``); for nodes that its policy has a plan for (``no-plan``; it failed, where no number of them
would do); for whoever holds the last copy of a layer (``last-copy``), or for its last checkpoint to be
written (``checkpoint-unwritten``). It failed: its loss or gradients were not finite, too many steps in a
row were skipped for a spike (``spikes``), its data is not what it was, nobody can read its data, or prepare
it (``data-unprepared``), a device's memory is too small for it, its only checkpoint is damaged, devices met
the same error twice (``same-error``), a device could not do what it was told (``device-refused``).
"""
PreparePhase = Literal["look", "read", "tokenize", "pack", "join"]
"""What is done to prepare a job's data: a look at its files, reading them all for their digests, tokenizing,
packing documents into rows, writing the folder.
"""
KeptOutCause = Literal["", "data-changed"]
"""Why no plan of a job uses a node, for programs: it would read other data than the job, or none."""
NodeCause = Literal[
    "",
    "link-closed", "silent", "not-heard", "device-lost", "links-down", "given-up", "left", "overdue",
    "notice", "operator", "evicted", "slow", "corruption",
    "data-changed", "no-place", "max-nodes", "too-few-devices", "no-compiler",
]  # fmt: skip
"""Why a node is in its state, for programs. "": for no reason, or one that only the sentence says.

It is lost, or not heard at present: its link closed, it is silent, it has not been heard since the daemon's
restart, a device of it ended, its links to others stayed down, somebody gave it up while it was waited for.
It left in order, or, ``overdue``, because the time of its notice was up. It is drained since it has notice
of its end, by an operator, since its links stayed down (``evicted``), since it is slow (as it may be in the
plan) or computed or kept wrong bits. It stands by: it would read other data than the job, the plan has no
place for it, the job may use no more nodes, it has fewer devices than the others, it can compile nothing and
the job compiles.
"""
LossCause = NodeCause | Literal["device-replaced", "device-renewed", "device-stopped"]
"""Of what a node, or a device of it, was lost, for programs: the node's cause; its spare took a dead device's
place (``device-replaced``); a device of it came back as another process (``device-renewed``), or was stopped
by a signal and is waited for, as it has a last copy (``device-stopped``).
"""
RefusalCause = Literal["", "key-revoked", "chosen-identity", "other-protocol", "other-node"]
"""Why an agent is refused, for programs: its key is not allowed any more, it chose a ZeroMQ identity, it
speaks another protocol, its key is of a node of another name.
"""
How = Literal[
    "sigkill", "sigterm", "sigstop", "hang", "net-drop", "agent-only", "device", "host",
    "slow", "flip-weight", "flip-moment", "flip-sum", "flip-mean",
]  # fmt: skip
Point = Literal[
    "forward", "backward", "weights", "reduce", "means", "reduced", "backup", "validate", "commit", "update",
    "updated", "frozen", "deploy", "copy",
    "ready", "checkpoint", "checkpoint-write", "ahead", "stage", "gather",
    "gather-backward",
]  # fmt: skip
AT_A_POINT: tuple[How, ...] = ("device", "hang")
"""What can wait for a fault point: a device process reaches it, and dies or hangs there by itself. All else
is done from outside.
"""


class DeviceInfo(msgspec.Struct, frozen=True):
    """One device process as its agent sees it.

    ``incarnation`` names this process among all that ever had the place: state is held by an incarnation, not
    by a name. ``memory_bytes``: of the device; for a CPU that of the host, which all its CPU devices share.
    ``address`` is "host:port" of its transport's TCP listener, ``local`` the path of its Unix-socket listener
    (peers on the same host use it). ``layout`` is the epoch of the layout it holds (0: none), ``epoch`` the
    highest epoch it has answered, ``step``/``round`` the first not committed there, ``holding`` whether it
    stopped at a boundary. ``arithmetic``: for people, what decides the bits of its results besides what it
    is: libraries, instructions, threads. ``traits``: all that does, by name. ``card``: the UUID of its card,
    or of its slice of one (MIG), as NVML knows it ("": it has none, or does not know).
    """

    device: str
    kind: str
    name: str
    memory_bytes: int
    address: str
    local: str
    pid: int
    job: str = ""
    layout: int = 0
    epoch: int = 0
    step: int = 0
    round: int = 0
    holding: bool = False
    incarnation: str = msgspec.field(default="", name="life")
    arithmetic: str = ""
    traits: dict[str, str] = {}
    card: str = ""

    @property
    def decides_bits(self) -> str:
        """What decides the bits of its results, in short, for people."""
        return bits_of(self.name or self.kind, self.arithmetic)

    @property
    def all_traits(self) -> dict[str, str]:
        """Devices of which this is the same come to the same bits."""
        return self.traits or {KIND: self.decides_bits}


def bits_of(model: str, arithmetic: str) -> str:
    """What decides the bits of a device's results: its model, and what it says of its arithmetic."""
    return ", ".join(filter(None, (model, arithmetic)))


class Spare(msgspec.Struct, frozen=True):
    """A node's warm spare: a process with torch imported that waits for a dead device's place.

    ``ready``: it can take one now. ``memory_bytes`` of the host's memory are its own (0: not known yet);
    it holds none of a GPU.
    """

    pid: int
    ready: bool = False
    memory_bytes: int = 0


class CardReport(msgspec.Struct, frozen=True):
    """An error that the card of ``device`` reported at ``at`` (POSIX seconds, by the clock of its host): an
    ``xid`` of the driver; or, where that is 0, its memory has had more errors that could not be corrected,
    ``ecc_uncorrected`` since the driver was loaded.
    """

    device: str
    at: float
    card: str = ""
    xid: int = 0
    ecc_uncorrected: int = -1


class Notice(msgspec.Struct, frozen=True):
    """Word that a node is about to be ended by others (a preemption, a SIGTERM): why, and ``left_s`` seconds
    from now.
    """

    reason: str
    left_s: float


_SECRET_FIELDS = frozenset({"secret", "key"})


def repr_without_secrets(struct: msgspec.Struct) -> str:
    """The repr of ``struct`` with an ellipsis for what only its receiver may know: a repr may come into a
    log.
    """
    fields = (
        f"{name}={'...' if name in _SECRET_FIELDS else repr(getattr(struct, name))}"
        for name in struct.__struct_fields__
    )
    return f"{type(struct).__name__}({', '.join(fields)})"


class DatagramSession(msgspec.Struct, frozen=True):
    """How an idle agent may send heartbeats by UDP: at ``port`` of the daemon's host, under the name
    ``session``, proven by ``key`` (``datagrams``).
    """

    port: int
    session: Annotated[bytes, Meta(min_length=DATAGRAM_SESSION_BYTES, max_length=DATAGRAM_SESSION_BYTES)]
    key: Annotated[bytes, Meta(min_length=DATAGRAM_KEY_BYTES, max_length=DATAGRAM_KEY_BYTES)]

    __repr__ = repr_without_secrets


class Flags(msgspec.Struct, frozen=True):
    """Boundary flags: what all devices do after the round in whose votes they travelled.

    ``writing``: the device is still writing the last checkpoint, so nobody begins another one, unless all
    hold. ``full``: there is no room for a checkpoint, so none begins because so many steps are over.
    """

    hold: bool = False
    checkpoint: bool = False
    writing: bool = False
    full: bool = False

    def __or__(self, other: Flags) -> Flags:
        return Flags(
            self.hold or other.hold,
            self.checkpoint or other.checkpoint,
            self.writing or other.writing,
            self.full or other.full,
        )


class Counters(msgspec.Struct, frozen=True):
    """Where training stands: the next round and step, how many updates were applied so far, how many of the
    last steps, without one between them that was applied, were skipped, and how many rounds have evaluated
    since the last step.

    ``spiked``: of all steps so far those that were skipped for a spike, ``spiked_in_row``: of those in the
    row. ``recent``: where the job looks for spikes, the finite losses of the last steps, oldest first.
    """

    # An overflow repeats a step, so a step's number does not name a try at it: rounds are what is numbered
    # on the wire. (D-recovery-003)
    round: int = 0
    step: int = 0
    applied: int = 0
    skipped_in_row: int = 0
    evaluated: int = 0
    spiked: int = 0
    spiked_in_row: int = 0
    recent: tuple[float, ...] = ()

    @property
    def skipped(self) -> int:
        """Steps that count, and made no update."""
        return self.step - self.applied

    def after(self, outcome: Outcome, *, spiked: bool = False) -> Counters:
        """The counters after a round with ``outcome``, skipped for a spike if ``spiked``. One that is
        repeated, or evaluates, is no step, and ends no row of skipped ones. ``recent`` is
        ``spikes.counters_after``'s.
        """
        if outcome == "evaluated":
            return msgspec.structs.replace(self, round=self.round + 1, evaluated=self.evaluated + 1)
        if outcome == "repeated":
            return msgspec.structs.replace(self, round=self.round + 1)
        skipped = self.skipped_in_row + 1 if outcome == "skipped" else 0
        return Counters(
            self.round + 1,
            self.step + 1,
            self.applied + (outcome == "applied"),
            skipped,
            spiked=self.spiked + spiked,
            spiked_in_row=self.spiked_in_row + spiked if skipped else 0,
            recent=self.recent,
        )

    def further(self, num_steps: int) -> Counters:
        """As many steps further, all applied, in the same round."""
        if not num_steps:
            return self
        step, applied = self.step + num_steps, self.applied + num_steps
        return Counters(self.round, step, applied, spiked=self.spiked, recent=self.recent)


class EvalSum(msgspec.Struct, frozen=True):
    """What a round found on one evaluation source: ``loss_sum`` over its ``targets``, tokens that it asked
    for, added exactly and rounded once (``math.fsum`` over micro-batches of loss x targets).
    """

    source: str
    loss_sum: float
    targets: int

    @property
    def loss(self) -> float:
        """The mean over its targets; 0 where it has none."""
        return self.loss_sum / (self.targets or 1)

    @property
    def perplexity(self) -> float:
        """Exp of the loss; infinite where that has no room in a float."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class RouterFigures(msgspec.Struct, frozen=True, array_like=True):
    """What the router of a layer came to in a step: the means over its micro-batches, as they count, of its
    load-balancing loss and its z-loss (0: not asked for), each before its coefficient; ``load``, the tokens
    of the expert with most, times those of the mean; and how many experts were ``idle``.
    """

    aux_loss: float
    z_loss: float
    load: float
    idle: int


class RouterMeans(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the routers of all layers came to in a step: the means over layers of both losses, and the largest
    ``load`` of a layer.
    """

    aux_loss: float
    z_loss: float
    load: float

    @staticmethod
    def over(routers: Collection[RouterFigures]) -> RouterMeans | None:
        """Of these layers; None where there are none."""
        if not routers:
            return None
        return RouterMeans(
            math.fsum(each.aux_loss for each in routers) / len(routers),
            math.fsum(each.z_loss for each in routers) / len(routers),
            max(each.load for each in routers),
        )


class Vote(msgspec.Struct, frozen=True):
    """What one device (or the union of several) knows of a round that it has fully reduced.

    ``norms``: bucket -> squared float64 gradient norm per key, in key order. ``losses``: micro-batch -> loss.
    ``nan``/``overflow``: seen in any contribution that went into the sums. ``digests``: bucket -> digest of
    its state before the round's update, in rounds whose step is compared (``fault_tolerance.check_every``).
    ``compared``: whether norms must be equal, too. ``routers``: layer -> what its router came to. ``made``:
    bucket -> slice -> fingerprint of the mean gradients that the device made itself, in the same rounds.
    """

    norms: dict[int, tuple[float, ...]]
    losses: dict[int, float]
    nan: bool = False
    overflow: bool = False
    flags: Flags = Flags()
    digests: dict[int, int] = {}
    compared: bool = True
    routers: dict[int, RouterFigures] = {}
    made: dict[int, dict[int, int]] = {}

    @staticmethod
    def union(votes: Iterable[Vote]) -> Vote:
        """All that votes of one round say together. Where replicas disagree the first word stands: whoever
        has all votes looks.
        """
        norms: dict[int, tuple[float, ...]] = {}
        losses: dict[int, float] = {}
        digests: dict[int, int] = {}
        routers: dict[int, RouterFigures] = {}
        made: dict[int, dict[int, int]] = {}
        nan = overflow = False
        flags = Flags()
        for vote in votes:
            norms, losses = vote.norms | norms, vote.losses | losses
            digests, routers = vote.digests | digests, vote.routers | routers
            for bucket, means in vote.made.items():
                made[bucket] = means | made.get(bucket, {})
            nan |= vote.nan
            overflow |= vote.overflow
            flags |= vote.flags
        norms, losses = dict(sorted(norms.items())), dict(sorted(losses.items()))
        return Vote(
            norms, losses, nan, overflow, flags, dict(sorted(digests.items())),
            routers=dict(sorted(routers.items())), made=dict(sorted(made.items())),
        )  # fmt: skip


def outcome_of(vote: Vote, *, evaluates: bool = False) -> Outcome:
    """What a round with this union of votes comes to; one that ``evaluates``, whatever its losses are. A NaN
    or an infinity would come again: it wins over overflow.
    """
    if evaluates:
        return "evaluated"
    if vote.nan:
        return "skipped"
    return "repeated" if vote.overflow else "applied"


class Peer(msgspec.Struct, frozen=True):
    """How to reach a device of the layout: its transport addresses and the host they are valid on."""

    address: str
    local: str
    host: str


class OpTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of a device's work in a round, on its own monotone clock (s); a task that halted and went on is
    two.

    ``kind``: F, B, I, W, U or S, as in ``watch``. ``stage``: hop of the micro-batch's route, ``layer`` the
    first one of that hop; both -1 where it is no hop. ``early``: an update made before all votes were in.
    ``again``: it had been done once, by somebody who died. ``gather_s``: of it, the time in which nothing was
    computed, since weights that others hold were not here yet.
    """

    kind: str
    stage: int
    micro_batch: int
    layer: int
    start_s: float
    stop_s: float
    early: bool = False
    again: bool = False
    gather_s: float = 0.0
