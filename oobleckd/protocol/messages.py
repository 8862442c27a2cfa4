"""Messages between the daemon and device processes about layouts and rounds, and which there are in all.

Owns this vocabulary only; the codec is in ``codec``. Two fences apply (docs/design.md): *control*
messages are fenced by ``epoch``, a lower one is dropped; *data* between devices is fenced by
(round, micro-batch, attempt) and never passes through here.

A **round** is one try at a step. Rounds are numbered without gaps and every committed round has one
outcome, the same on every device: ``applied``, ``skipped`` (NaN: the step counts, the weights stay)
or ``repeated`` (fixed-point overflow: the same step again with smaller scales). Without NaN and
overflow round and step advance together.

Addressing: the daemon talks to agents (one a node). A message with a ``device`` field is for, or
from, that device process, and the agent passes it on unread.
"""

from __future__ import annotations

import msgspec

from oobleckd.planner.plan import Detours, HopState, Layout, Route, Transfer
from oobleckd.planner.profile import Profile
from oobleckd.protocol.agentmessages import (
    Ack,
    DeviceAwake,
    DeviceLost,
    DeviceStopped,
    Dismiss,
    EndStopped,
    FiguresTold,
    Goodbye,
    Heartbeat,
    Hello,
    Inject,
    LogTold,
    Refused,
    TellLog,
    Wake,
    Welcome,
)
from oobleckd.protocol.artifactmessages import (
    ArtifactHere,
    ArtifactKept,
    ArtifactPart,
    ArtifactTaken,
    OfArtifacts,
)
from oobleckd.protocol.checkpointmessages import CheckpointFailed, CheckpointPart
from oobleckd.protocol.corruption import Fingerprints, Odd
from oobleckd.protocol.datamessages import (
    Identified,
    Identify,
    InputsChanged,
    InputsChecked,
    InputsMoved,
    PrepareData,
    PrepareDone,
    PrepareFailed,
    Preparing,
    StopPreparing,
)
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.message import Message
from oobleckd.protocol.modelnotes import FolderNote
from oobleckd.protocol.parts import (
    Counters,
    EvalSum,
    Flags,
    JobCause,
    Outcome,
    Peer,
    RouterFigures,
    SkipCause,
    Vote,
)

PROTOCOL = 14


class LinkDown(Message, frozen=True):
    """``device`` lost its link to ``peer`` without a goodbye."""

    device: str
    peer: str
    why: str


class Measured(Message, frozen=True):
    """Answer to ``Measure``. ``inputs``: what of the job it reads."""

    device: str
    job: str
    profile: Profile
    inputs: Inputs = ()


class Ready(Message, frozen=True):
    """All layers of the layout of ``epoch`` are here: ``copied_bytes`` came from others since the ``Deploy``,
    ``staged_bytes`` by pre-copy. ``notes``: what is to be said of the folder of the job's model. ``inputs``:
    what of the job the device reads. ``canary``: what it came to when it computed each kind of layer once
    (``traits.canary_words``; "": no canary was had).
    """

    device: str
    epoch: int
    copied_bytes: int = 0
    staged_bytes: int = 0
    notes: tuple[FolderNote, ...] = ()
    inputs: Inputs = ()
    canary: str = ""


class PreCopied(Message, frozen=True, tag="Prepared"):
    """Answer of a target to ``PreCopy``, once: the copies are here, as they were before ``round``, and go on
    with the rounds.
    """

    device: str
    number: int
    round: int


class Emptied(Message, frozen=True):
    """Answer to ``Release``, by its ``order``: the device holds nothing of a job, and drops no tensor message
    any more that is for the next.
    """

    device: str
    order: str


class Progress(Message, frozen=True):
    """Answer to ``Report``: what this device has of the round it is in.

    ``done``: layer -> micro-batches whose weight gradients are in this device's sums. ``reduced``: bucket
    -> its slices of which the mean gradients over all replicas are here, and all that it has, as bitmaps.
    ``vote`` is set once *all* its buckets are reduced (REDUCED) and is
    then the union of all votes it has heard for the round. ``last`` is the vote union of the round before
    (which it has committed), if it committed one in this incarnation. ``hops``: its part of the routes that
    the dead broke.
    """

    device: str
    epoch: int
    counters: Counters
    done: dict[int, tuple[int, ...]]
    reduced: dict[int, tuple[int, int]]
    vote: Vote | None = None
    last: Vote | None = None
    holding: bool = False
    hops: tuple[HopState, ...] = ()


class Held(Message, frozen=True):
    """The device stopped at a boundary: it will not begin ``counters.round`` before ``Resume``.

    ``finished``: the last step of the job is committed. ``digests``: bucket -> digest of the state, where no
    vote will follow that bears them: at the end, and where a checkpoint of this boundary is begun.
    """

    device: str
    epoch: int
    counters: Counters
    finished: bool = False
    digests: dict[int, int] = msgspec.field(default_factory=dict)


class StepDone(Message, frozen=True):
    """A committed round, told by every device to its agent, which keeps it until acknowledged.

    ``loss`` is the mean over all tokens that the step asks for (float64). ``samples`` counts the samples in
    the sums and ``ledger`` is a digest of which ones (docs/exactness.md). ``repeated`` layer-gradients were
    computed again by this device (redone work), ``forwards`` layer-forwards. ``early``: the device had
    updated before it had all votes; ``taken_back``: in vain. ``checkpoint``: a checkpoint of the state after
    it is begun; ``skipped``: one was due and is not begun, as the last one is still being written.
    ``fingerprints``: what was voted on, of the step that the ``Deploy`` names as ``recheck``.
    ``evaluated``: of a round that evaluates, what it found; the rest of a step is 0 there. ``cause``: why it
    was skipped. ``routers``: of every layer with a router, what that came to; ``experts``: of those layers
    that the device speaks for, the tokens of each expert. ``gradient_messages`` of ``gradient_bytes`` are the
    sums and means of gradients that it sent to other devices since the round before. Where a stage has
    several devices: ``gathered_bytes`` of weights that it read of the others of its stage,
    ``shard_gradient_bytes`` of gradients that it sent them, and ``gather_wait_s`` in which it waited for such
    weights.
    """

    device: str
    job: str
    epoch: int
    counters: Counters
    outcome: Outcome
    loss: float
    grad_norm: float
    lr: float
    samples: int
    ledger: str
    step_s: float
    busy_s: float
    layer_gradients: int = 0
    layer_forwards: int = 0
    early: bool = False
    taken_back: bool = False
    checkpoint: bool = False
    skipped: bool = False
    fingerprints: Fingerprints | None = None
    evaluated: tuple[EvalSum, ...] = ()
    cause: SkipCause = ""
    routers: dict[int, RouterFigures] = msgspec.field(default_factory=dict)
    experts: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    gradient_messages: int = 0
    gradient_bytes: int = 0
    gathered_bytes: int = 0
    shard_gradient_bytes: int = 0
    gather_wait_s: float = 0.0


class OpTimes(Message, frozen=True):
    """What a device did in a committed round, and when: told of some rounds (``Deploy.sample_every``), and
    lost where nobody hears it.

    ``ops``: msgpack of ``tuple[OpTime, ...]``, which nobody reads until somebody looks. ``at``: POSIX
    seconds, by the clock of its host, at which the clock of its op times stood at 0. ``layout``: the epoch of
    the one that it ran; ``repaired``: attempts in it made up for a loss.
    """

    device: str
    job: str
    epoch: int
    layout: int
    counters: Counters
    at: float
    ops: bytes
    repaired: bool = False


class DeviceFailed(Message, frozen=True):
    """A device cannot do what it was told for a reason that a user must mend; one clear sentence.
    ``damaged``: the checkpoint that it was to load, and that is not what was written ("": it is something
    else). ``cause``: what a program should know of the reason. ``unread``: it is what the job reads that
    cannot be used there; other devices may have it.
    """

    device: str
    job: str
    error: str
    hint: str = ""
    damaged: str = ""
    cause: JobCause = ""
    unread: bool = False


class Corrupted(Message, frozen=True):
    """Bits are wrong somewhere, and the device does not go on: holders of a bucket do not agree (``odds``),
    which every device of the layout finds in the same votes before it commits the round of ``counters``; or
    what it had added up has changed in its memory (``own``).
    """

    device: str
    job: str
    epoch: int
    counters: Counters
    odds: tuple[Odd, ...] = ()
    own: str = ""


ToDecideBy = (
    Hello
    | Heartbeat
    | DeviceLost
    | DeviceStopped
    | DeviceAwake
    | LinkDown
    | Measured
    | Ready
    | PreCopied
    | Emptied
    | Progress
    | Held
    | StepDone
    | OpTimes
    | CheckpointPart
    | CheckpointFailed
    | DeviceFailed
    | Identified
    | InputsChecked
    | InputsChanged
    | InputsMoved
    | Corrupted
    | Preparing
    | PrepareDone
    | PrepareFailed
    | Goodbye
)
"""What the core may decide by; the rest is for who watches, and for who compiles."""
FromWorker = ToDecideBy | FiguresTold | LogTold | OfArtifacts


class Measure(Message, frozen=True):
    """Measure the layers of ``job``'s model on ``device``."""

    device: str
    job: str
    spec: Job


class PreCopy(Message, frozen=True, tag="Prepare"):
    """Pre-copy the state of layers, while training goes on, for a plan that is to come
    (docs/mechanisms/precopy.md).

    ``number`` names the pre-copy, and is higher than that of the one before, whose place it takes; without
    ``transfers`` there is none any more. A source sends targets the state of the last boundary, and then, for
    so many ``rounds``, what every update is made from. ``peers`` are those that ``device`` does not know from
    its layout; ``secret`` (hex) opens links to them. ``devices_per_stage``: of the job, of whose state each
    holds its shard. ``preload``: nothing is pre-copied, and nothing ends; ``device``, which is to join, loads
    the job's model, text and compiled layers, and has only the copies left to do at the ``Deploy``.
    """

    device: str
    number: int
    job: str
    spec: Job
    transfers: tuple[Transfer, ...]
    rounds: int
    peers: dict[str, Peer]
    secret: str
    devices_per_stage: int = 1
    preload: bool = False


class Deploy(Message, frozen=True):
    """Get ready for ``layout``; keep the present one until ``Resume``.

    State of layers that ``device`` does not hold yet comes from ``source``: "init" (fresh weights by name and
    seed), a checkpoint directory, or "copy": from the ``transfers`` whose target it is. ``sources`` of
    transfers may be devices outside the new layout (drained ones). ``ops`` is the text form of this device's
    schedule, which leads until somebody dies (empty: whatever is ready). ``secret`` (hex) opens transport
    links of this job. ``buckets`` of the model are a pure function of the job, so they are not sent.
    ``precopied``: the ``PreCopy`` that pre-copied for this plan (0: none did). ``recheck``: the step whose
    ``StepDone`` tells fingerprints (-1: none does). Of rounds whose number ``sample_every`` divides the
    device tells its op times (0: of none). ``folder``: the name of the folder in ``checkpoint.dir`` that
    takes the job's checkpoints ("": the job's id), and ``journal`` that of the journal whose mark it has ("":
    nobody looks for one). ``only_evaluates``: the job began where its training ends, so no checkpoint of its
    end is written. ``held_per_stage``: how many devices held a stage so far, where ``layout`` has another
    number (0: it has the same): of each of their shards a target is sent what it lacks.
    """

    device: str
    epoch: int
    job: str
    spec: Job
    layout: Layout
    counters: Counters
    source: str
    transfers: tuple[Transfer, ...]
    peers: dict[str, Peer]
    ops: str
    secret: str
    precopied: int = msgspec.field(default=0, name="prepared")
    sample_every: int = 0
    recheck: int = -1
    folder: str = ""
    journal: str = ""
    only_evaluates: bool = False
    held_per_stage: int = 0


class Resume(Message, frozen=True):
    """Adopt the layout of ``layout``, free what it does not hold, and run (from a hold, too).

    ``round``: the one that begins; a device that is at another one by now, as this was said twice, takes no
    notice (-1: any).
    """

    device: str
    epoch: int
    layout: int
    round: int = -1


class Report(Message, frozen=True):
    """Devices died: freeze micro-batches whose standing route touches ``dead``; answer ``Progress``.

    ``dead`` is cumulative over the layout ``layout``, the one in force: a device that has prepared
    that layout but not adopted it adopts it now; a prepared layout of another epoch is dropped.
    """

    device: str
    epoch: int
    layout: int
    dead: tuple[str, ...]


class Decide(Message, frozen=True):
    """What all survivors do after a ``Report`` (docs/recovery.md).

    ``commit``: rounds below ``round`` that a survivor has not updated yet commit with this vote.
    ``round`` is the round that goes on. ``routes``: the new attempts in it. ``donors``: bucket -> device ->
    the slices, as a bitmap, whose means everybody takes from it. ``hold``: stop at the boundary after
    ``round``; with ``hold_now`` stop before it. ``detours``: all that stand beside the layout's routes from
    now on.
    """

    device: str
    epoch: int
    round: int
    commit: Vote | None
    routes: tuple[Route, ...]
    donors: dict[int, dict[str, int]]
    hold: bool
    hold_now: bool = False
    detours: Detours | None = None


class Flag(Message, frozen=True):
    """Put ``flags`` into the next votes. ``round``: the first one that was not known to be committed when
    this was said, so that a checkpoint that was begun since is not asked for again.
    """

    device: str
    epoch: int
    flags: Flags
    round: int = 0


class Release(Message, frozen=True):
    """The job is over on ``device``: drop its state, keep the process. Answered with ``Emptied`` by the same
    ``order``.
    """

    device: str
    job: str
    order: str


ToWorker = (
    Welcome
    | Refused
    | Dismiss
    | EndStopped
    | Wake
    | TellLog
    | ArtifactHere
    | ArtifactKept
    | ArtifactPart
    | ArtifactTaken
    | Measure
    | Identify
    | PreCopy
    | Deploy
    | Resume
    | Report
    | Decide
    | Flag
    | Ack
    | PrepareData
    | StopPreparing
    | Inject
    | Release
)
