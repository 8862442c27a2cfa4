"""What a recovery policy is asked, and what it answers, in codes and in words.

A policy is pure data in, data out: ``prepare(setup)`` once per job makes the templates; ``adapt``
turns a situation (who is alive, what they hold) into a proposal. The daemon never looks inside.
"""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from oobleckd.planner.plan import Layers, Plan, RecomputeWanted, Template, Transfer
from oobleckd.planner.profile import NOTHING, HeldBesides, Profile

# A set of names: the daemon's loop needs the answer and does not import the policies, which import scipy.
# (D-policies-002)
REROUTING = frozenset({"adaptive", "bamboo", "slipstream"})
"""Policies under which a job goes on with detours after a loss, instead of stopping for a new plan at the
next boundary. By name, since the daemon's loop does not import the policies (scipy).
"""
ROLLING_BACK = frozenset({"varuna"})
"""Policies under which every loss leads back to the last checkpoint, and whatever changes the plan goes by
way of one: no layer is ever copied from a device to another. By name, too.
"""

HORIZON_STEPS = 100.0
"""For so many steps a plan is chosen where nobody knows how long it is until the next loss."""

WITH_REDUNDANT_LAYERS = frozenset({"bamboo"})
"""Policies under which a device also holds layers that another one computes, to take over from it."""


Way = Literal["", "re-instantiate", "re-route", "take-over", "fill", "stay", "morph", "rollback", "wait"]
"""What a plan is, for programs: pipelines instantiated anew from templates; those at work as they are, with
micro-batches of vacant places computed by peers or by redundant holders, with places filled or layers given
back, or with nothing changed; job morphing (``varuna``). Where there is no plan: back to the checkpoint, or
too few nodes. "": a version that did not say.
"""
ActionKind = Literal[
    "start", "keep", "rebalance", "drop", "shrink", "reshape", "replace", "merge", "borrow", "join",
    "take-place", "move", "copy-back", "re-route", "take-over",
]  # fmt: skip
RejectionCause = Literal[
    "", "cost", "can-lose", "fewer-pipelines", "moves-layers", "no-redundant-holder", "no-room"
]
"""Why a way is not taken: it costs more; could lose fewer nodes than wanted; is no cheaper and has fewer
pipelines, and so fewer copies; the policy moves no layers; too much is lost for redundant holders, or they
have no room.
"""


class Action(msgspec.Struct, frozen=True):
    """What a new plan does to one pipeline or place that was. ``nodes`` are who it is done by; ``whose``
    place, pipeline or work it is, where that is somebody else's.

    Of pipelines that were hit: *drop*: its ``nodes`` are gone; *shrink*: its survivors go on alone;
    *reshape*: they are placed anew; *replace*: ``nodes`` that had no place come to the survivors (``whose``);
    *borrow*: ``nodes`` of another pipeline do; *merge*: ``nodes`` are one pipeline now. *join*: ``nodes`` had
    no place. Of pipelines that stay: *take-place*; *move*, from another place; *copy-back*: ``nodes`` get
    again what they held; *re-route*: they compute micro-batches of a vacant place (none: it had none);
    *take-over*, from their redundant layers. Of all: *start*, *keep*, *rebalance*: other sizes or places.
    """

    kind: ActionKind
    nodes: tuple[str, ...] = ()
    whose: tuple[str, ...] = ()


class PlanError(ValueError):
    """No plan exists; the message says why and ``hint`` what the user can change. ``memory``: the part of the
    hint that is to let devices have more memory, which is no way out where the limit is the device's own.
    """

    def __init__(self, problem: str, hint: str = "", memory: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.hint = hint
        self.memory = memory


class GradientExchange(msgspec.Struct, frozen=True):
    """How holders of the same layers exchange gradients (``costs.exchange``).

    ``sum_bytes``: of a parameter's sum, as it travels. In steps that ``check_every`` divides (0: in none) a
    second holder makes each mean. ``bytes_per_s``: what a node sends to others; 0: not known, and a step is
    planned as if the exchange took no time.
    """

    sum_bytes: int = 8
    check_every: int = 1
    bytes_per_s: float = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it is counted in a step."""
        return self.bytes_per_s > 0

    @property
    def checked(self) -> float:
        """The share of steps in which a second holder makes each mean."""
        return 1 / self.check_every if self.check_every else 0.0


class Setup(msgspec.Struct, frozen=True):
    """Everything about a job that does not change when nodes come and go.

    ``device_memory_bytes``: limit per device (0: unlimited). ``max_nodes``: templates are made for n0 up to
    at most this many nodes, and for ``min_nodes`` at least. ``max_devices_per_stage``: devices of a node that
    may share a stage. ``gap``: a template may be that share slower than the fastest (0: none is). ``held``:
    what the policy keeps on every device besides its stage. ``decoupled``: the backward is (``decoupled``);
    ``chunks``: stages a device then has, 0: whichever number is faster; ``staggered``: updates are.
    ``nodes_now``: that could be used when the job was prepared (0: not known), whose number of micro-batches
    templates are made for. ``dealt``: micro-batches are dealt to the pipelines in turn, as the first ones of
    a step are to be shared fairly by themselves (``batchramp``), and not in blocks. ``recompute``: what
    blocks compute again in the backward, everywhere; "auto": in each stage as little as its memory allows.
    ``exchange``: of gradients, and the link for it. ``whole_batch``: the micro-batches of a step, where those
    of ``num_micro_batches`` are turns of stages of several devices (0: they are not).
    """

    profile: Profile
    num_micro_batches: int
    f: int
    device_memory_bytes: int
    devices_per_node: int
    max_nodes: int
    max_devices_per_stage: int = 1
    gap: float = 0.0
    held: HeldBesides = NOTHING
    min_nodes: int = 1
    decoupled: bool = False
    nodes_now: int = 0
    chunks: int = 0
    staggered: bool = False
    dealt: bool = False
    recompute: RecomputeWanted = "none"
    exchange: GradientExchange = GradientExchange()
    whole_batch: int = 0

    @property
    def whole_node(self) -> int:
        """The devices of a node, where those of ``devices_per_node`` are places of stages of several."""
        return self.devices_per_node * self.profile.devices_per_stage


class Situation(msgspec.Struct, frozen=True):
    """The moment: ``nodes`` may be used; ``holdings`` (device -> layers) are the live copies now, which may
    include devices of nodes that are not to be used (draining). ``running``: the pipelines at work, as node
    tuples, with dead nodes and those of vacant places still named so that the policy sees which pipelines
    were hit. ``zones``: node -> what it fails together with, such as a zone of a cloud, where that is known.
    ``horizon_steps``: steps that are expected until the next loss. ``redo_s``: seconds of training since the
    last checkpoint (negative: there is none). ``held_per_stage``: so many devices hold a stage between them
    in ``holdings``, where that is another number than the setup's (0: it is the same).
    """

    nodes: tuple[str, ...]
    holdings: dict[str, Layers]
    running: tuple[tuple[str, ...], ...] = ()
    zones: dict[str, str] = {}
    horizon_steps: float = HORIZON_STEPS
    redo_s: float = -1.0
    held_per_stage: int = 0


class Rejected(msgspec.Struct, frozen=True):
    """An alternative that was not taken, with its modelled cost in seconds: ``what`` and ``why`` for people,
    ``way`` and ``cause`` for programs.

    ``at_least``: the cost is a bound from below. ``step_s``, ``copied_bytes``, ``precopy_s``: as the plan
    would be (0: none, or not known). ``risk_s``: of the cost, for a last copy that the next loss may take
    along. ``can_lose``: nodes (-1: not known).
    """

    what: str
    cost_s: float
    why: str
    way: Way = ""
    cause: RejectionCause = ""
    at_least: bool = False
    step_s: float = 0.0
    copied_bytes: int = 0
    precopy_s: float = 0.0
    risk_s: float = 0.0
    can_lose: int = -1


class Proposal(msgspec.Struct, frozen=True):
    """A plan, the copies that lead to it, its modelled cost in seconds, and one sentence of reason.

    ``ops``: device -> its schedule, as text. ``precopy_s``: seconds until the copies are made while training
    goes on, before the stop; 0: nobody waits for that, as nobody does where the caller cannot; negative: the
    policy has not weighed it. ``at_once``: copies begin in the step under way, even so; what is left of them
    is made in the stop. ``way`` and ``actions`` are the reason for programs: what the plan is, and what it
    does to each pipeline or place that it changes. ``summary``: of the reason what becomes of the pipelines,
    without sizes, copies and what can be lost ("": it is all of it). ``invalid``: what is wrong with the
    orders that were found; ``ops`` has none then, and devices do whatever is ready.
    """

    plan: Plan
    transfers: tuple[Transfer, ...]
    cost_s: float
    reason: str
    rejected: tuple[Rejected, ...] = ()
    ops: dict[str, str] = {}
    precopy_s: float = -1.0
    at_once: bool = False
    way: Way = ""
    actions: tuple[Action, ...] = ()
    summary: str = ""
    invalid: str = ""

    @property
    def begins(self) -> bool:
        """Whether copies begin before the stop."""
        return bool(self.transfers) and (self.at_once or self.precopy_s > 0)


class Policy(Protocol):
    """A recovery policy. ``reroutes``: after a loss the job goes on with detours (``REROUTING``).
    ``rolls_back``: it goes back to a checkpoint (``ROLLING_BACK``).
    """

    name: str
    reroutes: bool
    rolls_back: bool

    def prepare(self, setup: Setup) -> tuple[Template, ...]:
        """Templates for n0, n0+1, …, n_max nodes. Raises PlanError when no number of nodes fits."""

    def adapt(
        self,
        setup: Setup,
        templates: tuple[Template, ...],
        situation: Situation,
        sizes: tuple[int, ...] = (),
    ) -> Proposal:
        """The plan for ``situation``, with transfers from ``situation.holdings``. ``sizes``: those that
        ``instantiate`` finds for all nodes, where they are known already. Raises PlanError when there are
        fewer than n0 nodes. Layers that nobody holds get no transfer: the caller decides
        where their state comes from.
        """
