"""The journal: every durable fact as a tagged struct.

Owns the facts alone: what they change in the living state (``state``) is in ``apply``, where they are written
in ``daemon.journal``.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from oobleckd.planner.plan import Detours, Layout, Plan, Template
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import Profile
from oobleckd.protocol.changes import Change
from oobleckd.protocol.corruption import Odd
from oobleckd.protocol.deaths import Death
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import JobState
from oobleckd.protocol.modelnotes import FolderNote
from oobleckd.protocol.parts import (
    Counters,
    EvalSum,
    JobCause,
    NodeCause,
    Outcome,
    RouterMeans,
    SkipCause,
)
from oobleckd.protocol.text import all_visible, json_visible, visible

DrainCause = Literal["", "operator", "evicted", "slow", "corruption"]


class Died(msgspec.Struct, frozen=True):
    """A device that died of ``death`` when so many steps were committed; ``planned_bytes`` of memory it was
    to have at most (0: not known).
    """

    device: str
    death: Death
    step: int
    planned_bytes: int
    at: float


class Entry(msgspec.Struct, frozen=True, tag=True):
    """Base of everything in the journal. ``at`` is POSIX seconds."""


class JobSubmitted(Entry, frozen=True):
    """A job was queued; its training starts at ``counters`` from ``source`` ("init" or a checkpoint folder).

    ``knows_on_nan``: whether its ``spec`` says what follows skipped steps. One that was submitted before that
    could be said goes on, as it did. ``folder``: the name of the one that it writes checkpoints into, which
    was made for it ("": by an older version, its id).
    """

    job: str
    spec: Job
    source: str
    counters: Counters
    at: float
    knows_on_nan: bool = False
    folder: str = ""


class FolderTaken(Entry, frozen=True):
    """The job writes checkpoints into ``folder`` from its next plan on, which is a name in its
    ``checkpoint.dir``.
    """

    job: str
    folder: str
    at: float


class JobStateChanged(Entry, frozen=True):
    """The job's state in the table, the reason shown with it, and the cause, which says that to programs (""
    in entries of earlier versions, but for some failures).
    """

    job: str
    state: JobState
    reason: str
    at: float
    cause: JobCause = ""


class PauseAsked(Entry, frozen=True):
    """Whether a user wants the job to stand still, or (``ending``) to end once its state is in a
    checkpoint.
    """

    job: str
    paused: bool
    ending: bool = False


class JobDeleted(Entry, frozen=True):
    """Somebody wants a job that is over in no list any more. What it was is kept: entries may yet come that
    name it, and its number is taken.
    """

    job: str
    at: float


class DataPrepared(Entry, frozen=True):
    """The job reads prepared ``folders``, one for each of its parts, in order ("": as its ``spec`` says)."""

    job: str
    folders: tuple[str, ...]
    at: float


class ProfileMeasured(Entry, frozen=True):
    """Costs of a model on a kind of device, under the core's own ``key``."""

    key: str
    profile: Profile


class TemplatesMade(Entry, frozen=True):
    """What the policy prepared for the job."""

    job: str
    setup: Setup
    templates: tuple[Template, ...]


class FolderNoted(Entry, frozen=True):
    """What the devices say of the folder that the job's model starts from."""

    job: str
    notes: tuple[FolderNote, ...]


class EpochRaised(Entry, frozen=True):
    """``epoch`` may be used from now on. ``dead``: all lost devices of the layout in force."""

    job: str
    epoch: int
    dead: tuple[str, ...]
    why: str
    at: float


class Restarted(Entry, frozen=True):
    """A daemon began anew. One ``epoch`` may have been told of which the journal knows nothing: none up to it
    is used.
    """

    epoch: int
    at: float


class LayoutDeployed(Entry, frozen=True):
    """All devices are ready: ``layout`` is in force. ``incarnations``: device -> the incarnation that holds
    its layers.

    ``offered``: the nodes that the plan was made for (some may be idle in it). ``made``: what the plan was
    made from, where that is something else than before.
    """

    job: str
    layout: Layout
    plan: Plan
    counters: Counters
    incarnations: dict[str, str] = msgspec.field(name="lives")
    offered: tuple[str, ...]
    at: float
    made: TemplatesMade | None = None


class Detoured(Entry, frozen=True):
    """The job goes on without its dead: ``detours`` stand beside the routes of the layout in force.

    No plan has been made for those who are left: what the plan in force was offered does not count any more.
    """

    job: str
    epoch: int
    detours: Detours
    at: float


class StepEntry(Entry, frozen=True):
    """A committed round. ``seq`` is that of the change that announced it, ``cause`` why it was skipped ("":
    it was not, or by an earlier version, as not finite). ``routers``: of a mixture of experts.
    """

    job: str
    counters: Counters
    outcome: Outcome
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    ledger: str
    step_s: float
    at: float
    seq: int
    cause: SkipCause = ""
    routers: RouterMeans | None = None

    @property
    def why(self) -> SkipCause:
        """Why it was skipped, also where an earlier version did not say."""
        return self.cause or ("not-finite" if self.outcome == "skipped" else "")


class Evaluated(Entry, frozen=True):
    """A committed round that evaluates: a sum of each source with micro-batches in it. The last round of an
    evaluation has its ``totals`` over all rounds, its ``seconds``, and the ``seq`` of the change that
    announced it (else none, 0 and 0).
    """

    job: str
    counters: Counters
    epoch: int
    sums: tuple[EvalSum, ...]
    step_s: float
    at: float
    totals: tuple[EvalSum, ...] = ()
    seconds: float = 0.0
    seq: int = 0


class RolledBack(Entry, frozen=True):
    """A layer's last copy is gone, or the policy rolls back: training goes on at ``counters`` from
    ``source``; later steps do not count.
    """

    job: str
    source: str
    counters: Counters
    steps_lost: int
    at: float


class Released(Entry, frozen=True):
    """The job's state is in a checkpoint only; no device holds it any more."""

    job: str
    source: str
    at: float


class CheckpointWritten(Entry, frozen=True):
    """A complete checkpoint of ``counters`` lies in ``directory``."""

    job: str
    counters: Counters
    directory: str
    at: float


class InputsFixed(Entry, frozen=True):
    """What the job reads: whoever has another text takes no part. Said again where more of it is known."""

    job: str
    inputs: Inputs
    at: float


class CheckpointChecked(Entry, frozen=True):
    """All who read for the checkpoint of ``counters``, and for those before it, have found afterwards that
    their text was the right one.
    """

    job: str
    counters: Counters
    at: float


class IncidentOpened(Entry, frozen=True):
    """A recovery began."""

    incident: IncidentView


class IncidentClosed(Entry, frozen=True):
    """A recovery is over."""

    incident: IncidentView


class NodeDrained(Entry, frozen=True):
    """A node is (``undo``: no longer) kept out of plans. ``cause``: for programs ("": not said, as in entries
    of earlier versions).
    """

    node: str
    reason: str
    undo: bool
    at: float
    cause: DrainCause = ""

    @property
    def code(self) -> DrainCause:
        """The cause, also where an earlier version said it in the reason alone."""
        return "corruption" if self.quarantines else self.cause

    @property
    def quarantines(self) -> bool:
        """Whether it is for wrong bits, and nobody but an operator should undo it."""
        if self.cause:
            return self.cause == "corruption"
        return self.reason.startswith("quarantined: ")  # an earlier version said so in the reason alone


class NodeJoined(Entry, frozen=True):
    """A node is here, for the first time, anew after its incarnation was over, or elsewhere than before: it
    is expected from now on.
    """

    node: str
    host: str
    zone: str
    at: float


class NodeOver(Entry, frozen=True):
    """The node's incarnation is over: ``cause``, and as a ``code``. One that ``left`` in order, or had notice
    of its end, is not expected back.
    """

    node: str
    cause: str
    left: bool
    at: float
    code: NodeCause = ""


class NodeForgotten(Entry, frozen=True):
    """Somebody says that the node will not come back, and it is not kept out of plans any more, should it."""

    node: str
    at: float


class RecordsLost(Entry, frozen=True):
    """The journal was found damaged, and what was lost of it is nowhere else: ``what`` was found, and
    ``kept_as`` is what is left ("": nothing).
    """

    what: str
    kept_as: str
    at: float


class CorruptionFound(Entry, frozen=True):
    """Bits were wrong at the boundary before ``step``: holders did not agree (``odds``); these devices are to
    blame, or nobody could tell.
    """

    job: str
    step: int
    odds: tuple[Odd, ...]
    named: tuple[str, ...]
    at: float


class CorruptionSettled(Entry, frozen=True):
    """``step`` was computed again: these devices had been wrong, or (none) all who had disagreed."""

    job: str
    step: int
    named: tuple[str, ...]
    at: float


class KindTrained(Entry, frozen=True):
    """Devices with these traits train the job, which none of its layouts had before."""

    job: str
    traits: dict[str, str]


class DeviceDied(Entry, frozen=True):
    """A device of the job died, and said why, or the kernel did."""

    job: str
    died: Died


class Noted(Entry, frozen=True):
    """A change that was announced, for ``story`` and for sequence numbers that go on after a restart.

    ``data``: key -> JSON, as bytes, since the raw JSON of a ``Change`` fits into no other encoding.
    """

    seq: int
    at: float
    kind: str
    level: Literal["debug", "info", "warn", "error"]
    text: str
    story: tuple[str, ...]
    data: dict[str, bytes]


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def note(change: Change) -> Noted:
    """The entry of an announced change."""
    fields = _fields(msgspec.json.encode(change.data))
    data = {key: bytes(raw) for key, raw in fields.items()}
    return Noted(change.seq, change.at, change.kind, change.level, change.text, change.story, data)


def noted(entry: Noted) -> Change:
    """The change that ``entry`` keeps."""
    fields = b",".join(b'"%s":%s' % (key.encode(), value) for key, value in entry.data.items())
    data = msgspec.Raw(b"{%s}" % fields)
    return Change(entry.seq, entry.at, entry.kind, entry.level, entry.text, entry.story, data)


AnyEntry = (
    JobSubmitted
    | FolderTaken
    | JobStateChanged
    | PauseAsked
    | JobDeleted
    | DataPrepared
    | ProfileMeasured
    | TemplatesMade
    | FolderNoted
    | EpochRaised
    | Restarted
    | LayoutDeployed
    | Detoured
    | StepEntry
    | Evaluated
    | RolledBack
    | Released
    | CheckpointWritten
    | InputsFixed
    | CheckpointChecked
    | IncidentOpened
    | IncidentClosed
    | NodeDrained
    | NodeJoined
    | NodeOver
    | NodeForgotten
    | RecordsLost
    | CorruptionFound
    | CorruptionSettled
    | KindTrained
    | DeviceDied
    | Noted
)

AS_IT_IS = (
    JobSubmitted,
    FolderTaken,
    CheckpointWritten,
    RolledBack,
    Released,
    InputsFixed,
    DataPrepared,
    ProfileMeasured,
    TemplatesMade,
    LayoutDeployed,
    StepEntry,
    Evaluated,
)
"""Entries whose texts are paths that are opened, or names that were looked at before: never changed."""


def as_shown(entry: AnyEntry) -> AnyEntry:
    """``entry`` with what others wrote in it made visible: nothing that a terminal, a log or a page obeys."""
    # Here, where every entry passes, and not wherever one is shown: those are many, and one forgotten is
    # enough. (D-watching-016)
    if isinstance(entry, Noted):
        text, story = visible(entry.text), tuple(map(visible, entry.story))
        return msgspec.structs.replace(entry, text=text, story=story, data=_shown(entry.data))
    return entry if isinstance(entry, AS_IT_IS) else all_visible(entry)


def _shown(data: dict[str, bytes]) -> dict[str, bytes]:
    return {key: json_visible(value) for key, value in data.items()}
