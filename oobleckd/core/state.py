"""The durable state of the daemon: what the journal builds. Changed only by ``apply``."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from oobleckd.core.blame import Dispute
from oobleckd.core.entries import Died, Noted
from oobleckd.core.evaluations import Evaluations
from oobleckd.core.goodput import Book
from oobleckd.core.states import FINAL
from oobleckd.planner.plan import Detours, Layout, Plan, Template, node_of
from oobleckd.planner.policy import Setup
from oobleckd.planner.profile import Profile
from oobleckd.protocol.api import LostRecords
from oobleckd.protocol.canonical import digest
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import JobState
from oobleckd.protocol.modelnotes import FolderNote
from oobleckd.protocol.parts import Counters, JobCause, NodeCause, RouterMeans, SkipCause

HISTORY = 5000
RECENT_STEPS = 20
RECENT_DEATHS = 20
KEPT_STEPS = 4096
"""Steps of a job, and losses of its rounds, in memory: what a view of now, a late report or a checkpoint that
is being written can ask for. All of them are in the journal.
"""
KEPT_INCIDENTS = 2000
KEPT_ROLLBACKS = 21
"""One more than ``failures`` looks back on: it begins where the one before them was."""
KEPT_DISPUTES = KEPT_LOST_RECORDS = 100
KEPT_PROFILES = 200
KEPT_WHOLE = 20
"""Jobs that are over and keep what was planned for them, which is most of a job."""
MIN_KEPT = 2
"""Complete checkpoints that are on the disk whatever ``checkpoint.keep`` says: the newest, and the one that
was it before.
"""


class Written(msgspec.Struct, frozen=True, gc=False):
    """A checkpoint that is complete: of the state after ``step`` steps; ``until`` that number of steps, and
    for ``took_s`` seconds, it was being written. ``cost_s``: what that cost training (None: nothing tells),
    once it ``is_measured``.
    """

    step: int
    until: int
    took_s: float
    cost_s: float | None = None
    is_measured: bool = False

    @property
    def told_by(self) -> int:
        """The last step that tells what it cost."""
        return max(self.until, self.step + 1) - 1


class Step(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A committed step, small enough to keep some thousands of them."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    ledger: str
    outcome: str
    epoch: int
    at: float
    step_s: float
    cause: SkipCause = ""
    routers: RouterMeans | None = None


class KeptCheckpoint(msgspec.Struct, frozen=True, gc=False):
    """A state that the job can roll back to: a complete checkpoint, or where it began ("init", or a folder).
    ``checked``: it is known to come of the right text. ``newest``: the last step before it.
    """

    directory: str
    counters: Counters
    checked: bool = False
    newest: Step | None = None


class Expected(msgspec.Struct, frozen=True, gc=False):
    """A node that should be here: where it was last, and since when that is so. ``lost``: why it is not ("":
    it was here when last heard of), and as a ``code``.
    """

    host: str
    zone: str
    at: float
    lost: str = ""
    code: NodeCause = ""


def _number(step: Step) -> int:
    return step.step


class _Survivors(NamedTuple):
    """The live devices of ``layout`` beside the ``dead``, in name order, and their nodes."""

    layout: Layout | None = None
    dead: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    nodes: frozenset[str] = frozenset()


class _Remembers:
    """Has room for what is no part of the state: ``survivors`` are looked up, and not kept on disk."""

    __slots__ = ("_digest", "_fewest", "_survivors")
    _survivors: _Survivors
    _fewest: tuple[_Survivors, int]
    _digest: tuple[Job | None, str]

    def _remember(self, found: _Survivors) -> _Survivors:
        self._survivors = found
        return found

    def _remember_fewest(self, found: tuple[_Survivors, int]) -> int:
        self._fewest = found
        return found[1]

    def _remember_digest(self, found: tuple[Job | None, str]) -> str:
        self._digest = found
        return found[1]


@dataclass(slots=True)
class JobRecord(_Remembers):
    """A job. ``counters``: the first round and step not known to be committed; ``start``: where it began.

    ``source``: where the state comes from when no device holds it. ``ending``: it was cancelled, and is over
    once its state is in a checkpoint. ``dead``: lost devices of ``layout``, ``incarnations``: device -> the
    incarnation of it that is in ``layout``. ``detours`` stand beside the routes of ``layout``; ``settled``:
    the dead whom they, or nothing more, take care of. ``steps`` are the newest, in order and without a gap;
    ``losses``: round -> loss, of the newest rounds, for the check of late and double reports. ``fence``:
    rounds told under an epoch up to it are of a history that was given up. ``began``: the round in which the
    present one began. ``rolled_back_at``: when it last went back to a checkpoint, or to the start.
    ``deployed_at``: when the first layout was in force. ``written``: the newest checkpoints, oldest first.
    ``book``: where the time of its devices went. ``origin``: the ``source`` that it was submitted with.
    ``kept``: the newest complete checkpoints, oldest first, of which the last is ``checkpoint``.
    ``disputes``: disagreements of which nobody knows yet who was wrong. ``notes``: what is to be said of its
    model's folder. ``num_skipped``: steps that were skipped, also those that a rollback took;
    ``num_spiked``: of these for a spike. ``folder``: the
    name of that which its checkpoints go into ("": its id, in a folder that may have no mark yet). ``kinds``:
    the traits of all devices that ever trained it, those that are alike once. ``deaths``: the newest of
    devices that knew what they died of, oldest first. ``inputs``: the identity of what it reads, from its
    first deployment on, or from the checkpoint that it was resumed from. ``readers``: device -> its
    incarnation, of the last layout that was in force. ``num_incidents``: ever. ``measuring``: what one of
    ``written`` cost is not known yet. ``deleted``: nobody is shown it any more.
    """

    id: str
    spec: Job
    submitted_at: float
    source: str
    start: Counters
    counters: Counters
    state: JobState = "queued"
    reason: str = ""
    cause: JobCause = ""
    finished_at: float | None = None
    paused: bool = False
    ending: bool = False
    epoch: int = 0
    dead: tuple[str, ...] = ()
    settled: tuple[str, ...] = ()
    detours: Detours | None = None
    setup: Setup | None = None
    templates: tuple[Template, ...] = ()
    plan: Plan | None = None
    layout: Layout | None = None
    incarnations: dict[str, str] = field(default_factory=dict)
    offered: tuple[str, ...] = ()
    steps: list[Step] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    step_s: deque[float] = field(default_factory=deque)
    steps_lost: int = 0
    samples_lost: int = 0
    fence: int = 0
    began: int = 0
    rolled_back_at: list[float] = field(default_factory=list)
    deployed_at: float | None = None
    written: list[Written] = field(default_factory=list)
    checkpoint: str = ""
    checkpoint_counters: Counters = field(default_factory=Counters)
    book: Book = field(default_factory=Book)
    origin: str = "init"
    kept: list[KeptCheckpoint] = field(default_factory=list)
    disputes: tuple[Dispute, ...] = ()
    notes: tuple[FolderNote, ...] = ()
    num_skipped: int = 0
    num_spiked: int = 0
    folder: str = ""
    kinds: list[dict[str, str]] = field(default_factory=list)
    deaths: list[Died] = field(default_factory=list)
    inputs: Inputs = ()
    readers: dict[str, str] = field(default_factory=dict)
    num_incidents: int = 0
    measuring: bool = False
    evaluations: Evaluations = field(default_factory=Evaluations)
    deleted: bool = False

    def __post_init__(self) -> None:
        self.step_s = deque(self.step_s, maxlen=RECENT_STEPS)
        self._remember_fewest((self._remember(_Survivors()), 0))
        self._remember_digest((None, ""))

    @property
    def final(self) -> bool:
        """Whether the job is over."""
        return self.state in FINAL

    @property
    def only_evaluates(self) -> bool:
        """Whether it began where its training ends: its state is that of its ``origin``, and stays so."""
        return self.start.step >= self.spec.train.steps

    @property
    def n0(self) -> int:
        """The fewest nodes that hold the model (0 when not planned yet)."""
        return min((template.num_nodes for template in self.templates), default=0)

    @property
    def unsettled(self) -> bool:
        """Whether devices are dead whom neither detours nor a new layout take care of yet."""
        return set(self.dead) != set(self.settled)

    def index_of(self, step: int) -> int:
        """Where in ``steps`` the one is that tells of ``step``; their number, where none does yet."""
        return bisect_left(self.steps, step, key=_number)

    def step_before(self, step: int) -> Step | None:
        """The newest of ``steps`` that was before ``step``."""
        index = self.index_of(step)
        return self.steps[index - 1] if index else None

    def keep(self, step: Step) -> None:
        """Append to ``steps``, and let the oldest go where they are too many."""
        # They are in the journal, from which whoever wants to see them reads them. (D-daemon-026)
        self.steps.append(step)
        if len(self.steps) > KEPT_STEPS:
            del self.steps[: KEPT_STEPS // 8]  # some at once: each time all others move

    def keep_loss(self, round_: int, loss: float) -> None:
        """Enter the loss of a round, and let the oldest go where they are too many."""
        self.losses[round_] = loss
        if len(self.losses) > KEPT_STEPS:
            self.losses = dict(list(self.losses.items())[KEPT_STEPS // 8 :])

    def shelve(self, *, whole: bool) -> None:
        """Keep of a job that is over what its view shows; what was planned for it as long as it is
        ``whole``.
        """
        self.losses, self.steps = {}, self.steps[-1:]
        self.evaluations.shelve()
        if not whole:
            self.setup, self.templates, self.plan = None, (), None

    def digest(self) -> str:
        """Of its specification (``oobleckd.protocol.canonical``). Asked at every look, and that takes longer
        than all else.
        """
        of, known = self._digest
        return known if of is self.spec else self._remember_digest((self.spec, digest(self.spec)))

    def survivors(self) -> tuple[str, ...]:
        """Live devices of the layout in force, in name order."""
        return self._who().devices

    def surviving_nodes(self) -> frozenset[str]:
        """The nodes of ``survivors``."""
        return self._who().nodes

    def _who(self) -> _Survivors:
        """Asked at every message, and thousands of names take a while to sort."""
        if self.layout is None:
            return _Survivors()
        known = self._survivors
        if known.layout is not self.layout or known.dead != self.dead:
            devices = tuple(sorted(set(self.layout.holdings) - set(self.dead)))
            nodes = frozenset(map(node_of, devices))
            known = self._remember(_Survivors(self.layout, self.dead, devices, nodes))
        return known

    def fewest_holders(self) -> int:
        """Of all layers of the layout in force the fewest live nodes that hold one whole. Asked at every
        look, and thousands of devices take a while to count.
        """
        who = self._who()
        if self.layout is not None and self._fewest[0] is not who:
            holders: list[set[str]] = [set() for _ in range(self.layout.num_layers)]
            unable = self.layout.unable(self.dead)
            for device in [device for device in who.devices if device not in unable]:
                for layer in self.layout.holdings[device].layers():
                    holders[layer].add(node_of(device))
            return self._remember_fewest((who, min(map(len, holders), default=0)))
        return self._fewest[1]

    def undeploy(self, source: str) -> None:
        """No device holds the job any more; its state is in ``source``."""
        self.layout, self.plan, self.incarnations, self.offered = None, None, {}, ()
        self.dead, self.settled, self.detours = (), (), None
        self.source = source


@dataclass(slots=True)
class State:
    """Everything durable. ``jobs`` in order of submission; ``drained``: node -> reason; ``drain_causes``:
    that, for programs; ``nodes``: those that should be here, by name. ``lost_records``, ``incidents`` and
    ``history``: the newest. ``num_incidents``: ever.
    """

    jobs: dict[str, JobRecord] = field(default_factory=dict)
    profiles: dict[str, Profile] = field(default_factory=dict)
    drained: dict[str, str] = field(default_factory=dict)
    drain_causes: dict[str, NodeCause] = field(default_factory=dict)
    nodes: dict[str, Expected] = field(default_factory=dict)
    lost_records: list[LostRecords] = field(default_factory=list)
    incidents: dict[str, IncidentView] = field(default_factory=dict)
    history: deque[Noted] = field(default_factory=deque)
    epoch: int = 0
    seq: int = 0
    num_incidents: int = 0

    def __post_init__(self) -> None:
        self.history = deque(self.history, maxlen=HISTORY)

    @property
    def quarantined(self) -> set[str]:
        """The nodes that are kept out of plans since they have had wrong bits."""
        return {node for node, cause in self.drain_causes.items() if cause == "corruption"}

    # Hidden and not gone: what comes later may name a job that is over. (D-service-024)
    @property
    def shown(self) -> list[JobRecord]:
        """The jobs that nobody has deleted, oldest first."""
        return [job for job in self.jobs.values() if not job.deleted]

    @property
    def next_number(self) -> int:
        """What the id of the next job ends with: more than that of any before, as numbers may have been
        passed over.
        """
        numbers = (job.rpartition("-")[2] for job in self.jobs)
        return 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
