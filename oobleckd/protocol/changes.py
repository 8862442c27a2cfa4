"""What happened, as the event stream tells it: a ``Change`` is a number, a time, a sentence for people, and
typed ``data`` for programs.

Owns the kinds of data, how they are read, and the upgrade of what earlier versions wrote: the only place
where a sentence of ours is taken apart. Who tells what, and in which words, is the core's.

``data`` is a JSON object whose ``type`` says which of the structs below it is. A reader keeps what it does
not know, of a newer version, as it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import msgspec

from oobleckd.planner.policy import Action, Way
from oobleckd.protocol.deaths import Death
from oobleckd.protocol.generation import Numbered
from oobleckd.protocol.incidentviews import IncidentView, RejectedView, RollbackCause
from oobleckd.protocol.jobviews import JobState
from oobleckd.protocol.parts import How, JobCause, KeptOutCause, NodeCause, SkipCause
from oobleckd.protocol.traits import Difference

Level = Literal["debug", "info", "warn", "error"]
Evidence = Literal["", "outvoted", "own-check", "recomputed", "too-often"]
SlowFate = Literal["", "reported", "drained", "needed"]
"""What follows for the node of a slow device: the job only wants to know, it is drained, or without it the
job could not lose ``fault_tolerance.f`` nodes any more.
"""
Act = Literal[
    "",
    "submit",
    "pause",
    "resume",
    "cancel",
    "checkpoint",
    "drain",
    "undrain",
    "forget",
    "kill",
    "end-wait",
    "delete",
]
Own = Literal["journal", "journal-damaged", "planner", "replay", "manifest", "set-aside"]


def _tag(name: str) -> str:
    """``NodeLost`` is ``"node-lost"``."""
    return "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("-")


class Payload(msgspec.Struct, frozen=True, tag_field="type", tag=_tag, omit_defaults=True):
    """Base of what a change carries. ``kind`` is that of the change."""

    kind: ClassVar[str]


# --------------------------------------------------------------------------- jobs


class JobMoved(Payload, frozen=True):
    """A job is in another ``state``, for a ``reason`` that people read, and of a ``cause`` where a program
    should know it.
    """

    kind: ClassVar[str] = "job"
    job: str
    state: JobState
    reason: str = ""
    cause: JobCause = ""


class PreparingBegan(Payload, frozen=True):
    """A node prepares the data of a job from now on."""

    kind: ClassVar[str] = "job"
    job: str
    node: str


class PreparingEnded(Payload, frozen=True):
    """A node prepares the data of a job no longer: it is done, in ``folders`` (one for each source, "" where
    none is needed), or another node goes on, for a ``reason`` that people read. ``cause``: it cannot, its
    process ended by itself, or the node is lost, drained or about to end.
    """

    kind: ClassVar[str] = "job"
    job: str
    node: str
    cause: Literal["", "done", "refused", "died", "node-gone"] = ""
    reason: str = ""
    folders: tuple[str, ...] = ()


class JobWentBack(Payload, frozen=True):
    """A job goes on from the state of ``step``, ``steps_lost`` before where it was. ``why`` is for people,
    ``cause`` for programs. ``source``: the folder of that checkpoint; "init": fresh weights ("": a version
    that did not say).
    """

    kind: ClassVar[str] = "job"
    job: str
    steps_lost: int
    step: int
    why: str = ""
    cause: RollbackCause = ""
    source: str = ""


class DisputeUnsettled(Payload, frozen=True):
    """``devices`` had other bits in ``step`` (the first is 1), and whose were wrong cannot be told: computed
    again they had what neither had before.
    """

    kind: ClassVar[str] = "job"
    job: str
    step: int
    devices: tuple[str, ...]


class FileMoved(Payload, frozen=True):
    """At ``path``, which a job reads, lies another file ``now``, none, or the right one again."""

    kind: ClassVar[str] = "job"
    job: str
    path: str
    now: Literal["other", "gone", "back"]


class DeviceEnded(Payload, frozen=True):
    """A device of a job knew what it ``died_of``, and it was the first time. ``planned_bytes``: what the
    planner counted on for it (0: not known).
    """

    kind: ClassVar[str] = "job"
    job: str
    device: str
    died_of: str
    death: Death | None = None
    planned_bytes: int = 0


class ModelSaid(Payload, frozen=True):
    """Something of the folder that a job's model starts from is not used, or lacks (``what``)."""

    kind: ClassVar[str] = "model"
    job: str
    what: str
    count: int = 0
    names: tuple[str, ...] = ()


# --------------------------------------------------------------------------- nodes


class NodeHere(Payload, frozen=True):
    """A node said hello on ``host``; ``back``: it was known before."""

    kind: ClassVar[str] = "node"
    node: str
    host: str = ""
    back: bool = False


class NodeLost(Payload, frozen=True):
    """A node is lost, of what ``cause`` says to people, and ``code`` to programs."""

    kind: ClassVar[str] = "node"
    node: str
    cause: str
    code: NodeCause = ""


class NodeLeft(Payload, frozen=True):
    """A node left in order: why, in ``cause`` for people, and in ``code`` for programs."""

    kind: ClassVar[str] = "node"
    node: str
    cause: str
    code: NodeCause = ""


class NodeEnding(Payload, frozen=True):
    """A node has notice that it will be ended in ``left_s`` seconds."""

    kind: ClassVar[str] = "node"
    node: str
    reason: str
    left_s: float


class NodeDismissed(Payload, frozen=True):
    """A node that has notice of its end may leave: nothing of it is needed."""

    kind: ClassVar[str] = "node"
    node: str


class NodeRevived(Payload, frozen=True):
    """A node that was declared lost is heard again. ``fresh``: it joins anew, without what it held."""

    kind: ClassVar[str] = "node"
    node: str
    fresh: bool


class LinkClosed(Payload, frozen=True):
    """The link between a node and the daemon closed, which is no loss yet."""

    kind: ClassVar[str] = "node"
    node: str


class DeploymentRetried(Payload, frozen=True):
    """A device that joins lost its link to ``peer`` while it was deployed, as ``why`` tells: once more, and
    then without its node.
    """

    kind: ClassVar[str] = "node"
    node: str
    device: str
    peer: str
    job: str
    why: str = ""


class SpareReady(Payload, frozen=True):
    """A spare of a node has started, and takes the place of the next device of it that dies."""

    kind: ClassVar[str] = "node"
    node: str


class DeviceReplaced(Payload, frozen=True):
    """A device of a node died, as ``evidence`` shows, and the spare takes its place."""

    kind: ClassVar[str] = "node"
    node: str
    device: str
    evidence: str


class CardError(Payload, frozen=True):
    """The card of a device reported an error, at ``reported_at`` (POSIX seconds, by the clock of its host):
    an ``xid`` of NVIDIA's driver, which ``means`` that; or (0) that its memory has had errors that could not
    be corrected, ``ecc_uncorrected`` since the driver was loaded. Nothing follows from it by itself.
    """

    kind: ClassVar[str] = "node"
    node: str
    device: str
    card: str = ""
    xid: int = 0
    means: str = ""
    ecc_uncorrected: int = -1
    reported_at: float = 0.0


class DevicePace(Payload, frozen=True):
    """A device is ``slow`` compared with its peers, or is so no more. ``fate``: what follows for its node."""

    kind: ClassVar[str] = "node"
    node: str
    device: str
    slow: bool
    fate: SlowFate = ""


class NodeQuarantined(Payload, frozen=True):
    """A device of a node computes or keeps wrong bits: no plan uses the node until somebody lets it back.
    ``why`` is for people, ``evidence`` what it rests on: most holders have other bits, its own check, the
    step computed again, or too many disagreements that nobody could settle.
    """

    kind: ClassVar[str] = "node"
    node: str
    device: str
    why: str
    evidence: Evidence = ""


class NodeKeptOut(Payload, frozen=True):
    """No plan of ``job`` uses a node, for what a device of it would read."""

    kind: ClassVar[str] = "node"
    node: str
    device: str
    job: str
    cause: KeptOutCause
    why: str


class NodeLetIn(Payload, frozen=True):
    """A node that was kept out reads what ``job`` reads, and may be used again."""

    kind: ClassVar[str] = "node"
    node: str
    job: str


class LastCopyAwaited(Payload, frozen=True):
    """A silent node, or a device of it, has the last copy of ``layers``: it is waited for up to ``wait_s``,
    as going back costs ``steps``.
    """

    kind: ClassVar[str] = "node"
    node: str
    job: str
    layers: tuple[int, ...]
    wait_s: float
    steps: int


class LastCopyWaitOver(Payload, frozen=True):
    """Who was waited for (``device``; "": the node itself) goes on, ``after_s`` after it was missed, and no
    step is lost; or it was waited for in vain (not ``back``).
    """

    kind: ClassVar[str] = "node"
    node: str
    job: str
    back: bool
    device: str = ""
    after_s: float = 0.0


# --------------------------------------------------------------------------- plans


class TemplatesReady(Payload, frozen=True):
    """There are templates of so many nodes."""

    kind: ClassVar[str] = "plan"
    job: str
    sizes: tuple[int, ...]


class PlanChosen(Payload, frozen=True):
    """A plan was chosen, or the one in force stays (``stays``) though nodes ``came`` or ``went``, at a
    modelled cost, before those ``rejected``.

    ``reason`` is for people; for programs ``way`` is what the plan is, and ``actions`` what it does to each
    pipeline or place that it changes. ``precopy_s``: until its copies are made before the stop (0: none are
    waited for).
    """

    kind: ClassVar[str] = "plan"
    job: str
    cost_s: float
    rejected: tuple[RejectedView, ...]
    reason: str = ""
    stays: bool = False
    way: Way = ""
    actions: tuple[Action, ...] = ()
    precopy_s: float = 0.0
    came: tuple[str, ...] = ()
    went: tuple[str, ...] = ()


class PlanRefused(Payload, frozen=True):
    """There is no new plan."""

    kind: ClassVar[str] = "plan"
    job: str
    reason: str


class CopiesBegun(Payload, frozen=True):
    """So many bytes are copied for the next plan while training goes on."""

    kind: ClassVar[str] = "plan"
    job: str
    copied_bytes: int


class PlanDeployed(Payload, Numbered, frozen=True):
    """A layout is in force: its ``pipelines`` as nodes, and what was copied for it, in the stop and before it
    (``staged_bytes``).
    """

    kind: ClassVar[str] = "plan"
    job: str
    epoch: int
    pipelines: tuple[tuple[str, ...], ...]
    copied_bytes: int
    staged_bytes: int


class DevicesDiffer(Payload, frozen=True):
    """The devices of a job do not come to the same bits."""

    kind: ClassVar[str] = "plan"
    job: str
    differences: tuple[Difference, ...]


# --------------------------------------------------------------------------- steps and incidents


class StepCommitted(Payload, Numbered, frozen=True):
    """A step (the first is 1) was committed. ``loss`` is null where it is no finite number. ``outcome``:
    applied, skipped, or repeated; ``cause``: why it was skipped.
    """

    kind: ClassVar[str] = "step"
    job: str
    step: int
    loss: float | None
    outcome: str
    epoch: int
    cause: SkipCause = ""


class EvalLoss(msgspec.Struct, frozen=True):
    """The loss of an evaluation ``source``, over its ``targets``; null where it is no finite number."""

    source: str
    loss: float | None
    targets: int


class EvaluationDone(Payload, Numbered, frozen=True):
    """The model was evaluated after ``step`` steps, which took ``seconds``."""

    kind: ClassVar[str] = "evaluation"
    job: str
    step: int
    losses: tuple[EvalLoss, ...]
    seconds: float
    epoch: int


class LossDisputed(Payload, frozen=True):
    """A device tells another loss of a step, or of an evaluation, than the one before it did; or an
    evaluation came to another one after a rollback.
    """

    kind: ClassVar[str] = "step"
    device: str
    job: str = ""


class IncidentBegan(Payload, Numbered, frozen=True):
    """``nodes`` are lost, which begins an incident or adds to it."""

    kind: ClassVar[str] = "incident"
    incident: str
    nodes: tuple[str, ...]
    epoch: int
    cause: str


class IncidentOver(Payload, frozen=True):
    """The recovery is over; ``view`` is all of it."""

    kind: ClassVar[str] = "incident"
    incident: str
    view: IncidentView


# --------------------------------------------------------------------------- checkpoints


class CheckpointComplete(Payload, frozen=True):
    """The checkpoint of ``step`` is on disk."""

    kind: ClassVar[str] = "checkpoint"
    job: str
    step: int
    directory: str


class CheckpointDamaged(Payload, frozen=True):
    """A checkpoint is not what was written, as ``device`` found; ``step`` is the job's."""

    kind: ClassVar[str] = "checkpoint"
    job: str
    step: int
    directory: str
    device: str


class CheckpointFolder(Payload, frozen=True):
    """From the next plan on the checkpoints of a job go into ``folder``."""

    kind: ClassVar[str] = "checkpoint"
    job: str
    folder: str


class CheckpointRoom(Payload, frozen=True):
    """Whether the next checkpoint can be written: it takes ``needed_bytes``, and so many are free (-1: not
    known). ``errno``: the system's error where one was tried and refused, by its name ("ENOSPC").
    """

    kind: ClassVar[str] = "checkpoint"
    job: str
    needed_bytes: int
    free_bytes: int
    errno: str = ""


class CheckpointGivenUp(Payload, frozen=True):
    """The checkpoint in ``directory`` cannot be completed, and is given up."""

    kind: ClassVar[str] = "checkpoint"
    job: str
    directory: str
    error: str


class CheckpointIncomplete(Payload, frozen=True):
    """The checkpoint of ``step`` stays incomplete, as a later one is on disk: ``num_written`` of
    ``num_parts`` were written.
    """

    kind: ClassVar[str] = "checkpoint"
    job: str
    step: int
    directory: str
    num_written: int
    num_parts: int


class CheckpointSkipped(Payload, frozen=True):
    """There is no checkpoint of ``step``: that of ``unfinished`` is still being written."""

    kind: ClassVar[str] = "checkpoint"
    job: str
    step: int
    unfinished: int


# --------------------------------------------------------------------------- people, and the daemon itself


class Audited(Payload, frozen=True):
    """``who`` asked for ``act`` on ``job`` or ``nodes``, for a ``reason`` that they gave. ``how``: the fault
    of a "kill". ``resumed``: the checkpoint folder that a submitted job starts from; ``as_named``: it reads
    the data that it names now, as nobody knows what that checkpoint was made from.
    """

    kind: ClassVar[str] = "audit"
    who: str
    act: Act = ""
    job: str = ""
    nodes: tuple[str, ...] = ()
    reason: str = ""
    how: How | Literal[""] = ""
    resumed: str = ""
    as_named: bool = False


class DaemonTrouble(Payload, frozen=True):
    """``what`` the daemon itself cannot do, or can again (``over``): write its journal, read all of it
    ("journal-damaged"; over: it is mended, and nothing was lost), use a planning process, record for replay,
    complete the checkpoint in ``path`` ("manifest"), or give the damaged one in ``path`` another name
    ("set-aside").
    """

    kind: ClassVar[str] = "daemon"
    what: Own
    path: str = ""
    error: str = ""
    over: bool = False


AnyPayload = (
    JobMoved
    | PreparingBegan
    | PreparingEnded
    | JobWentBack
    | DisputeUnsettled
    | FileMoved
    | DeviceEnded
    | ModelSaid
    | NodeHere
    | NodeLost
    | NodeLeft
    | NodeEnding
    | NodeDismissed
    | NodeRevived
    | LinkClosed
    | DeploymentRetried
    | SpareReady
    | DeviceReplaced
    | CardError
    | DevicePace
    | NodeQuarantined
    | NodeKeptOut
    | NodeLetIn
    | LastCopyAwaited
    | LastCopyWaitOver
    | TemplatesReady
    | PlanChosen
    | PlanRefused
    | CopiesBegun
    | PlanDeployed
    | DevicesDiffer
    | StepCommitted
    | EvaluationDone
    | LossDisputed
    | IncidentBegan
    | IncidentOver
    | CheckpointComplete
    | CheckpointDamaged
    | CheckpointFolder
    | CheckpointRoom
    | CheckpointGivenUp
    | CheckpointIncomplete
    | CheckpointSkipped
    | Audited
    | DaemonTrouble
)
PAYLOADS: tuple[type[Payload], ...] = get_args(AnyPayload)

if TYPE_CHECKING:
    # msgspec refuses a whole answer over one unknown type, and a console must show what it knows of a newer
    # daemon. (D-watching-015)
    Carried = AnyPayload | msgspec.Raw
else:
    Carried = (
        msgspec.Raw
    )  # else a whole answer would be refused for data that a newer version has: ``_read`` keeps it

NO_DATA = msgspec.Raw(b"{}")


class Change(msgspec.Struct, frozen=True):
    """One entry of the event stream. ``seq`` grows by one; a gap means: fetch a snapshot.

    ``kind`` is a word such as node, job, step, evaluation, incident, plan, checkpoint, audit; ``story`` are
    the keys (``node:n3``, ``incident:inc-2``, ``job:…``) under which ``story`` finds it. ``data`` says in
    fields what ``text`` says in words: its ``type`` which fields.
    """

    seq: int
    at: float
    kind: str
    level: Level
    text: str
    story: tuple[str, ...]
    data: Carried = msgspec.field(default_factory=lambda: NO_DATA)

    def __post_init__(self) -> None:
        if isinstance(self.data, msgspec.Raw):
            msgspec.structs.force_setattr(self, "data", _read(self.kind, self.text, self.data))


_decode = msgspec.json.Decoder(AnyPayload).decode


class _Earlier(msgspec.Struct):
    """What data of earlier versions, which had no ``type``, may have."""

    type: str = ""
    node: str = ""
    incident: str = ""
    view: IncidentView | None = None
    nodes: tuple[str, ...] = ()
    epoch: int = 0
    job: str = ""
    step: int = 0
    loss: float | None = None
    outcome: str = ""


_decode_old = msgspec.json.Decoder(_Earlier).decode


def _read(kind: str, text: str, raw: msgspec.Raw) -> AnyPayload | msgspec.Raw:
    """``raw`` as a payload; itself where it is none that is known."""
    if bytes(raw) == bytes(NO_DATA):
        return raw
    try:
        known: AnyPayload = _decode(raw)
    except msgspec.ValidationError:
        return _upgraded(kind, text, raw)
    return known


def _upgraded(kind: str, text: str, raw: msgspec.Raw) -> AnyPayload | msgspec.Raw:
    """The payload of a change that an earlier version made, which had no ``type``, and some of it in the text
    alone. Where nobody goes by it, and of a newer version, ``raw`` stays what it is.
    """
    try:
        old = _decode_old(raw)
    except msgspec.ValidationError:
        old = _Earlier()
    match kind if not old.type else "newer":
        case "step" if old.outcome:
            return StepCommitted(old.job, old.step, old.loss, old.outcome, old.epoch)
        case "incident" if old.view is not None:
            return IncidentOver(old.view.id, old.view)
        case "incident" if old.incident:
            return IncidentBegan(old.incident, old.nodes, old.epoch, text.removeprefix(f"{old.incident}: "))
        case "node" if old.node and text.startswith(lost := f"{old.node} lost: "):
            return NodeLost(old.node, text.removeprefix(lost))
    return raw
