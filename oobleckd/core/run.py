"""The living side of the active job: what is asked of its devices and what they have answered.

Owns no rule; lost at a restart of the daemon and rebuilt by asking the devices again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from oobleckd.core.decide import Decision
from oobleckd.core.incident import Incident
from oobleckd.core.pace import Paces
from oobleckd.core.state import JobRecord
from oobleckd.planner.plan import Layout, Plan, Template, Transfer
from oobleckd.planner.policy import Proposal, Setup, Situation
from oobleckd.protocol.checkpointmessages import CheckpointPart
from oobleckd.protocol.datamessages import Preparing
from oobleckd.protocol.inputs import Inputs
from oobleckd.protocol.messages import (
    Deploy,
    DeviceFailed,
    Held,
    LinkDown,
    Progress,
    Ready,
    StepDone,
)
from oobleckd.protocol.parts import Counters, Flags
from oobleckd.protocol.traits import Difference

# off: no device holds the job. adrift: the daemon restarted and waits for Hellos. report: progress is
# asked. run: the layout runs, or stops at a boundary. deploy: a new layout is being brought in.
Phase = Literal["off", "adrift", "report", "run", "deploy"]


@dataclass(slots=True)
class Candidate:
    """A layout that is being deployed. ``incarnations``: device -> the incarnation that takes part.
    ``resharding``: its stages have another number of devices.
    """

    epoch: int
    layout: Layout
    plan: Plan
    offered: tuple[str, ...]
    incarnations: dict[str, str]
    deploys: dict[str, Deploy]
    ready: dict[str, Ready] = field(default_factory=dict)
    resharding: Resharding | None = None


@dataclass(slots=True)
class PreCopyUnderWay:
    """What is pre-copied: ``transfers``, by the ``incarnations`` of their sources and targets, waited for
    until ``until_step``. ``precopied``: targets that have said so.
    """

    number: int
    transfers: tuple[Transfer, ...]
    incarnations: dict[str, str]
    targets: frozenset[str]
    until_step: int
    precopied: set[str] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        """Whether all targets keep up."""
        return self.targets <= self.precopied


@dataclass(slots=True)
class Preloads:
    """Devices that were told to load the job before they join, with their incarnations. It was last looked at
    for ``proposal``, when the members had changed so many ``turns``.
    """

    told: dict[str, str] = field(default_factory=dict)
    proposal: Proposal | None = None
    turns: int = -1


@dataclass(slots=True)
class PlannerRequest:
    """A question to the planner. ``situation`` is None for ``prepare``."""

    ticket: int
    setup: Setup
    situation: Situation | None = None


@dataclass(slots=True)
class StageSizeQuestion:
    """A question to the planner: which number of devices a stage is the best for ``nodes``."""

    ticket: int
    nodes: tuple[str, ...]


@dataclass(slots=True)
class Resharding:
    """Stages are to have another number of devices, as long as ``nodes`` are those to plan with: what is
    planned from then on.
    """

    nodes: tuple[str, ...]
    setup: Setup
    templates: tuple[Template, ...]

    @property
    def n0(self) -> int:
        """The fewest nodes that hold the model."""
        return min(template.num_nodes for template in self.templates)


@dataclass(slots=True)
class Wait:
    """For a device (or node) that holds the last copy of ``layers`` and does not run: since ``since``, its
    word of then at ``heard`` and for as long as ``until`` (both of the waking clock). ``incarnation``: of the
    device, "" for a node. ``incident``: the one that was opened for it.
    """

    layers: tuple[int, ...]
    since: float
    until: float
    heard: float
    incarnation: str = ""
    incident: str = ""


class WriteRefusal(NamedTuple):
    """Why a disk does not take a checkpoint, as people are told once: at which ``node`` ("": at the
    daemon's), of which error (``errno``, or ``words`` where it has no name), and of the last checkpoint of a
    job at which ``step`` (-1: of any other).
    """

    node: str
    step: int
    errno: str
    words: str


@dataclass(slots=True)
class Trouble:
    """What is known of the room for checkpoints (``room``). ``text``: why the last try came to nothing, for
    people ("": none did since one was complete); ``since`` when, after ``tries`` of them, the last of the
    boundary before ``round``; ``said``: what people were told of it.

    ``needed_bytes`` and ``free_bytes`` as they were seen last (-1: nobody knows). ``short``: there is not
    enough. ``retry_at``: none is begun before. ``looking``: a look is under way, which was asked for at
    ``looked_at``; ``looked_for``: the last checkpoint at that time. ``spoiled``: folder -> the round of a try
    that was given up. ``rewrite``: the last one of the job has lost files, and is to be written anew.
    """

    text: str = ""
    since: float = 0.0
    tries: int = 0
    round: int = -1
    said: set[WriteRefusal] = field(default_factory=set)
    needed_bytes: int = 0
    free_bytes: int = -1
    short: bool = False
    retry_at: float = 0.0
    looking: bool = False
    looked_at: float = float("-inf")
    looked_for: str | None = None
    spoiled: dict[str, int] = field(default_factory=dict)
    rewrite: bool = False


@dataclass(slots=True)
class Preparation:
    """Who prepares the job's data: ``node`` ("": nobody), as it was told by ``order``, and how far it said it
    is. ``refused``: node -> why it cannot; ``deaths``: node -> how often its process ended by itself;
    ``able``: who was past a look, the last one.
    """

    node: str = ""
    order: str = ""
    far: Preparing | None = None
    refused: dict[str, str] = field(default_factory=dict)
    deaths: Counter[str] = field(default_factory=Counter)
    able: str = ""


class StageTraffic(NamedTuple):
    """What a device that shares a stage with others has had of them: bytes of weights that it read, bytes of
    gradients that it sent them, and seconds in which it waited for such weights.
    """

    gathered_bytes: int = 0
    gradient_bytes: int = 0
    waited_s: float = 0.0


@dataclass(slots=True)
class KeptOut:
    """A node that no plan uses. ``wrong``: device -> what is wrong with what it would read; last
    ``asked_at``.
    """

    asked_at: float
    wrong: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """The active job. ``answers``/``held`` are of the present epoch only.

    ``resumed_round``: the round that the last ``Resume`` began. ``want_checkpoint``: a user asked for one at
    this step or later (-1: nobody did). ``completing``: directories all of whose parts are here, whose
    manifest is being written. ``begun``: the boundary whose checkpoint is being written (None: none is, as
    far as is known); ``skipped_for``: the step of one because of which another was skipped, once people were
    told. ``early``: round -> a step told before the ones in front of it. ``told``: device -> the last round
    that it told of. ``updates_early``: rounds of devices that were updated before all votes were in,
    ``updates_taken_back`` those in vain. ``gradients``: device -> messages with sums or means of gradients
    that it has sent, and their bytes; ``in_stage``: what it had of the others of its stage, where there are
    any. ``flags``: what was last put into the votes. ``stumbled``: joining
    devices a link of which broke in the deployment before this one. ``guests``: devices that were ever told
    to pre-copy or preload (``preloads``). ``broken``: links of which was heard while it was adrift.
    ``weighed_steps``: for so many steps the policy made the plan that is in force, or left it as it is.
    ``forgotten``: the journal has lost its end, so nothing that devices hold is known. ``told_of``: in what
    its devices differ, as people were told. ``seen_alive``: by what of the members, and of those who take
    part, all incarnations were last seen to go on. ``trouble``: with the disk of its checkpoints. ``waits``:
    device or node -> what is waited for (``lastcopy``); ``ending``: stopped devices whose agents were told to
    end them, with their incarnations. ``restarted``: it was active when another daemon stopped. ``kept_out``:
    nodes with another text. Incarnation -> the first round that it read for (``reads_since``), and the last
    one before which it is known to have read the right text (``checked``). ``wholes``: device -> what it said
    when it had read all of it, until all agree. ``moved``: path -> what people were last told of it.
    ``unread``: the first word that a device cannot use the text; ``lacking_since``: too few nodes have it.
    ``preparation``: of the data. ``sized``: the nodes for which the number of devices a stage is the best,
    ``sizing``: for which that is asked, ``resharding``: what came of it.
    """

    job: JobRecord
    phase: Phase = "off"
    answers: dict[str, Progress] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    decision: Decision | None = None
    candidate: Candidate | None = None
    measuring: str = ""
    asked: PlannerRequest | None = None
    proposal: tuple[Situation, Proposal] | None = None
    pre_copy: PreCopyUnderWay | None = None
    guests: set[str] = field(default_factory=set)
    preloads: Preloads = field(default_factory=Preloads)
    refused: Situation | None = None
    refusal: str = ""
    satisfied: tuple[str, ...] | None = None
    incident: Incident | None = None
    flags: Flags = field(default_factory=Flags)
    flagged_round: int = -1
    resumed_round: int = -1
    want_checkpoint: int = -1
    parts: dict[str, dict[int, CheckpointPart]] = field(default_factory=dict)
    completing: set[str] = field(default_factory=set)
    begun: Counters | None = None
    skipped_for: int = -1
    early: dict[int, StepDone] = field(default_factory=dict)
    paces: Paces = field(default_factory=Paces)
    stumbled: set[str] = field(default_factory=set)
    broken: list[LinkDown] = field(default_factory=list)
    told: dict[str, int] = field(default_factory=dict)
    weighed_steps: float = 0.0
    updates_early: int = 0
    updates_taken_back: int = 0
    gradients: dict[str, tuple[int, int]] = field(default_factory=dict)
    in_stage: dict[str, StageTraffic] = field(default_factory=dict)
    forgotten: bool = False
    told_of: tuple[Difference, ...] = ()
    seen_alive: tuple[object, ...] = ()
    trouble: Trouble = field(default_factory=Trouble)
    waits: dict[str, Wait] = field(default_factory=dict)
    ending: dict[str, str] = field(default_factory=dict)
    kept_out: dict[str, KeptOut] = field(default_factory=dict)
    restarted: bool = False
    reads_since: dict[str, int] = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=dict)
    wholes: dict[str, Inputs] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    unread: DeviceFailed | None = None
    lacking_since: float | None = None
    preparation: Preparation = field(default_factory=Preparation)
    sized: tuple[str, ...] = ()
    sizing: StageSizeQuestion | None = None
    resharding: Resharding | None = None

    @property
    def n0(self) -> int:
        """The fewest nodes that the next plan can have."""
        return self.job.n0 if self.resharding is None else self.resharding.n0

    def all_held(self) -> bool:
        """Whether every survivor stopped at the same boundary."""
        survivors = self.job.survivors()
        if not survivors or not all(device in self.held for device in survivors):
            return False
        return len({self.held[device].counters for device in survivors}) == 1

    def finished(self) -> bool:
        """Whether the survivors, who all hold, have committed the last step."""
        return all(self.held[device].finished for device in self.job.survivors())

    def forget(self, phase: Phase) -> None:
        """Nothing that was asked before counts any more; go on in ``phase``."""
        self.phase = phase
        self.answers, self.held = {}, {}
        self.decision, self.candidate, self.pre_copy = None, None, None
        self.flags, self.flagged_round, self.begun = Flags(), -1, None
