"""Messages between daemon, agents and device processes: tagged frozen structs.

Owns the vocabulary only; the codec is in ``codec``. Two fences apply (docs/design.md): *control*
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

from typing import Literal

import msgspec

from oobleckd.planner.plan import Detours, HopState, Layout, Route, Transfer
from oobleckd.planner.profile import Profile
from oobleckd.protocol.corruption import Fingerprints, Odd
from oobleckd.protocol.deaths import Death
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.modelnotes import FolderNote
from oobleckd.protocol.nodeviews import DeviceFigures
from oobleckd.protocol.parts import (
    CardReport,
    Counters,
    DatagramSession,
    DeviceInfo,
    EvalSum,
    Flags,
    How,
    JobCause,
    Notice,
    Outcome,
    Peer,
    PreparePhase,
    RefusalCause,
    RouterFigures,
    SkipCause,
    Spare,
    Vote,
    repr_without_secrets,
)

PROTOCOL = 13


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of everything on the wire."""

    __repr__ = repr_without_secrets


# --------------------------------------------------------------------------- worker -> daemon


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


class DeviceUp(Message, frozen=True):
    """A device process tells its agent where it stands: at its start and whenever ``info`` changes.

    The agent keeps the last one for its Hello; it never travels to the daemon as it is.
    """

    info: DeviceInfo


class LastWords(Message, frozen=True):
    """A device process that is about to end tells its agent why, which says it in its ``DeviceLost``. It
    never travels to the daemon.
    """

    death: Death


class SpareUp(Message, frozen=True):
    """A spare tells its agent that all is imported. It never travels to the daemon."""


class TakePlace(Message, frozen=True):
    """The agent tells its spare which device it is from now on. ``before``: all that decided the bits of the
    process whose place it takes.
    """

    device: str
    before: dict[str, str] = {}


class LoadLayers(Message, frozen=True):
    """The agent tells its spare that devices of the node have the compiled layers of ``spec`` by now
    (``train.compile``), which the spare is to load.
    """

    spec: Job


class LayersLoaded(Message, frozen=True):
    """A spare has loaded so many ``kinds`` of layers of what it was told last. It never travels to the
    daemon.
    """

    kinds: int


class ArtifactMade(Message, frozen=True):
    """A device tells its agent that what ``key`` names is in the file ``path``, which is the agent's from now
    on. It never travels to the daemon.
    """

    key: str
    path: str


class ArtifactHere(Message, frozen=True):
    """The agent's answer to ``WantArtifact`` of a device: it is in the file ``path``, which is the device's
    from now on; "": the device is to compile it. The daemon never says so.
    """

    key: str
    path: str


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
    digests: dict[int, int] = {}


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
    sums and means of gradients that it sent to other devices since the round before.
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
    routers: dict[int, RouterFigures] = {}
    experts: dict[int, tuple[int, ...]] = {}
    gradient_messages: int = 0
    gradient_bytes: int = 0


class CheckpointPart(Message, frozen=True):
    """One bucket of the checkpoint of ``counters`` is written (and synced) as ``file`` in ``directory``.

    ``tensors``: tensor name -> SHA-256 of its bytes. ``corpus``: digest of the text that was trained on.
    The daemon completes the checkpoint when every bucket has arrived.
    """

    device: str
    job: str
    counters: Counters
    directory: str
    bucket: int
    num_buckets: int
    file: str
    num_bytes: int
    sha256: str
    tensors: dict[str, str]
    corpus: str = ""


class CheckpointFailed(Message, frozen=True):
    """A device cannot write its share of the checkpoint of ``counters`` in ``directory``, and keeps all of
    its state.

    ``needed_bytes``: its share, ``free_bytes``: what was free there (-1: nobody knows). Of the ``last`` one
    of a job, which is its result, it says so once and tries again by itself; any other is given up. ``error``
    is for people; ``errno`` is what programs tell causes apart by, the name of the system's error ("ENOSPC";
    "": it was none, or the device is of a version that does not say).
    """

    device: str
    job: str
    counters: Counters
    directory: str
    error: str
    needed_bytes: int = 0
    free_bytes: int = -1
    last: bool = False
    errno: str = ""


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


class Identified(Message, frozen=True):
    """What a device would read of ``job``, or does: said when it begins with it, with its ``canary`` then
    (``Ready``), and in answer to ``Identify``. ``error``: why it can read nothing.
    """

    device: str
    job: str
    inputs: Inputs
    error: str = ""
    hint: str = ""
    canary: str = ""


class InputsChecked(Message, frozen=True):
    """A device has read all bytes of what it reads, from after its round before ``counters`` on: they are
    what they were when it began.
    """

    device: str
    job: str
    counters: Counters
    inputs: Inputs


class InputsChanged(Message, frozen=True):
    """What a device has mapped was written to: it goes no further, and whatever it gave in rounds before
    ``counters`` may have come from other bytes. ``what``: which file, and how it shows.
    """

    device: str
    job: str
    counters: Counters
    what: str


class InputsMoved(Message, frozen=True):
    """Another file lies at ``path`` by now, or none: what a device has mapped is untouched, and who opens the
    path reads something else.
    """

    device: str
    job: str
    path: str
    now: Literal["other", "gone", "back"]


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


class Preparing(Message, frozen=True):
    """How far an agent's process is with the data of ``job``, once a second, and whenever that is asked for.

    ``done_bytes`` of ``total_bytes`` of a ``phase``, ``bytes_per_s`` of it (0: not known yet); ``source``: of
    that one of several. ``order``, here and in the two that follow: of the ``PrepareData`` that it answers.
    """

    job: str
    order: str = ""
    phase: PreparePhase = "look"
    source: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    bytes_per_s: float = 0.0


class PrepareDone(Message, frozen=True):
    """The data of ``job`` is prepared: a folder for each source, in order ("": it needs none)."""

    job: str
    folders: tuple[str, ...]
    order: str = ""


class PrepareFailed(Message, frozen=True):
    """The data of ``job`` is not prepared, for a reason that a user must mend. ``begun``: more was done than
    a look, so that others would fail as well; ``died``: the process ended by itself, and might not again.
    """

    job: str
    error: str
    hint: str = ""
    begun: bool = False
    died: bool = False
    order: str = ""


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


class WantArtifact(Message, frozen=True):
    """Who has the artifact ``key`` (``protocol.artifacts``)? Of a device to its agent, and of that to the
    daemon, which answers with ``ArtifactKept`` when it is there, or when the asker is to make it.

    ``making``: the node was told so by an earlier daemon or on an earlier connection, and is at it.
    ``damaged``: bytes that came with this checksum are not those that it is of.
    """

    key: str
    making: bool = False
    damaged: str = ""


class GetArtifact(Message, frozen=True):
    """Send ``ArtifactPart`` of ``key`` from ``offset`` on."""

    key: str
    offset: int


class PutArtifact(Message, frozen=True):
    """Bytes of an artifact that the node has made, ``num_bytes`` in all, from ``offset`` on; the next ones
    follow ``ArtifactTaken``.
    """

    key: str
    num_bytes: int
    sha256: str
    offset: int
    data: bytes


class NoArtifact(Message, frozen=True):
    """Who was to make the artifact ``key`` does not."""

    key: str


class Goodbye(Message, frozen=True):
    """The agent leaves in order (SIGTERM). ``overdue``: its notice's time is up, and it was not let go."""

    incarnation: str
    reason: str
    overdue: bool = False


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
OfArtifacts = WantArtifact | GetArtifact | PutArtifact | NoArtifact
FromWorker = ToDecideBy | FiguresTold | LogTold | OfArtifacts


# --------------------------------------------------------------------------- daemon -> worker


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


class ArtifactKept(Message, frozen=True):
    """There is an artifact ``key``, of ``num_bytes`` with this checksum; 0: there is none, and the node that
    asked is to make it.
    """

    key: str
    num_bytes: int = 0
    sha256: str = ""


class ArtifactPart(Message, frozen=True):
    """Bytes of the artifact ``key`` from ``offset`` on, ``protocol.artifacts.PART_BYTES`` at most (none: it
    is not there any more).
    """

    key: str
    offset: int
    data: bytes


class ArtifactTaken(Message, frozen=True):
    """Of the artifact ``key`` all up to ``offset`` is here: go on from there; -1: no more of it is wanted."""

    key: str
    offset: int


class Measure(Message, frozen=True):
    """Measure the layers of ``job``'s model on ``device``."""

    device: str
    job: str
    spec: Job


class Identify(Message, frozen=True):
    """Say what you would read of ``job``."""

    device: str
    job: str
    spec: Job


class PreCopy(Message, frozen=True, tag="Prepare"):
    """Pre-copy the state of layers, while training goes on, for a plan that is to come
    (docs/mechanisms/precopy.md).

    ``number`` names the pre-copy, and is higher than that of the one before, whose place it takes; without
    ``transfers`` there is none any more. A source sends targets the state of the last boundary, and then, for
    so many ``rounds``, what every update is made from. ``peers`` are those that ``device`` does not know from
    its layout; ``secret`` (hex) opens links to them.
    """

    device: str
    number: int
    job: str
    spec: Job
    transfers: tuple[Transfer, ...]
    rounds: int
    peers: dict[str, Peer]
    secret: str


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
    end is written.
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


class Ack(Message, frozen=True):
    """Every ``StepDone`` of ``job`` with a round up to ``round``, and checkpoint parts up to it, are
    journaled.
    """

    job: str
    round: int


class PrepareData(Message, frozen=True):
    """To an agent: have the data of ``job`` prepared, by a process of its own. Who is at it, or has done it,
    says that again; who has failed under an ``order`` before begins anew.
    """

    job: str
    spec: Job
    order: str


class StopPreparing(Message, frozen=True):
    """To an agent: end what prepares the data of ``job``, and forget what came of it."""

    job: str


class Inject(Message, frozen=True):
    """Failure injection.

    ``how``: sigkill (agent and devices), sigterm (an orderly leave), sigstop (agent and devices), hang (a
    device process, its interpreter locked), net-drop (nothing of the node leaves or arrives), agent-only and
    device (SIGKILL of one process), host (sigkill, told to every node of a host). ``at`` names a fault point
    of the device process instead of "now" (docs/drills.md lists them), optionally at a given ``round``.
    flip-weight, flip-moment and flip-sum: one bit of a weight, an optimizer moment or a gradient sum of a
    device changes. slow: a device takes ``times`` as long for every layer. ``seconds``: sigstop, net-drop and
    slow end after so long (0: never).
    """

    how: How
    device: str = ""
    at: str = ""
    round: int = -1
    seconds: float = 0.0
    times: float = 1.0


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
