"""The base of policies under which pipelines at work stay: when ``oobleck`` answers, the plan of a grid, and
the words for it.

Owns the shell around the choice of ``slipstream``, ``bamboo`` and ``adaptive``. The choice is theirs, and so
is who does the work of a place that stays vacant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import msgspec

from oobleckd.planner.plan import Template, node_of
from oobleckd.planner.policies.cases import phrase, way_of
from oobleckd.planner.policies.filling import waiting_for
from oobleckd.planner.policies.grid import Grid, grid_of
from oobleckd.planner.policies.oobleck import Oobleck, bytes_of, nodes_of, size_of, steps_of
from oobleckd.planner.policy import Action, Proposal, Rejected, Setup, Situation
from oobleckd.words import count, noun, seconds, than

PLACES_SHOWN = 3


# What these policies have in common is the order of questions and the words; what each chooses is one
# method. (D-policies-019)
class Staying(ABC):
    """A policy under which a job goes on with detours after a loss, and which chooses among what can become
    of the pipelines at work.
    """

    name: str
    reroutes = True
    rolls_back = False

    def __init__(self) -> None:
        self.anew = Oobleck()

    def prepare(self, setup: Setup) -> tuple[Template, ...]:
        """Templates for n0 .. n_max nodes. Raises PlanError when no number of nodes fits."""
        return self.anew.prepare(setup)

    def adapt(
        self,
        setup: Setup,
        templates: tuple[Template, ...],
        situation: Situation,
        sizes: tuple[int, ...] = (),
    ) -> Proposal:
        """What the policy chooses; where no pipelines are at work, or templates are others by now, what
        ``oobleck`` proposes with these.

        Raises PlanError when there are fewer than n0 nodes.
        """
        anew = self.anew.adapt(setup, templates, situation, sizes)
        grid = grid_of(setup, templates, situation)
        return anew if grid is None else self.choose(situation, grid, anew)

    @abstractmethod
    def choose(self, situation: Situation, grid: Grid, anew: Proposal) -> Proposal:
        """What becomes of the pipelines of ``grid``; ``anew`` is what ``oobleck`` proposes."""


def proposal_of(
    situation: Situation,
    chosen: Grid,
    rejected: Iterable[Rejected],
    around: Callable[[Grid, int], tuple[Action, str]],
) -> Proposal:
    """The plan of ``chosen``. Nodes of the situation that have no place in it are idle. ``around``: who does
    the work of a vacant slot, and in words.
    """
    moved, work = placed(situation, chosen), [around(chosen, slot) for slot in chosen.vacant]
    actions = (*moved, *(action for action, _ in work)) or (Action("keep"),)
    reason = _reason(chosen, moved, [words for _, words in work])
    idle = tuple(waiting_for(chosen, situation))
    plan = msgspec.structs.replace(chosen.plan, idle=idle, step_s=chosen.step_s, reason=reason)
    return Proposal(
        plan, chosen.transfers, chosen.cost_s, reason, tuple(rejected), chosen.written.ops,
        way=way_of(actions), actions=actions, invalid=chosen.written.fault,
    )  # fmt: skip


def rejected_anew(chosen: Grid, anew: Proposal) -> Rejected:
    """The plan on all nodes that ``oobleck`` would make, cheaper or not: who stays moves no layers."""
    extra_s = anew.cost_s - chosen.cost_s
    copies = f"copies {size_of(anew.transfers)}" if anew.transfers else "copies nothing"
    over = steps_of(chosen.horizon_steps)
    why = f"{than(extra_s)} over {over}: {copies}, step {seconds(anew.plan.step_s)}"
    return Rejected(
        f"re-instantiate: pipelines of {nodes_of(anew.plan)}", anew.cost_s, why,
        "re-instantiate", "moves-layers",
        step_s=anew.plan.step_s, copied_bytes=bytes_of(anew.transfers),
    )  # fmt: skip


def _reason(grid: Grid, moved: Sequence[Action], work: Sequence[str]) -> str:
    """One sentence: who takes whose place, who does whose work, what is copied, what can be lost."""
    parts = [*map(phrase, moved), *work[:PLACES_SHOWN]]
    if len(work) > PLACES_SHOWN:
        more = len(work) - PLACES_SHOWN
        parts.append(f"{count(more, 'more place')} {noun(more, 'is')} vacant")
    return "; ".join([*(parts or [phrase(Action("keep"))]), f"{costs(grid)}; can lose {grid.tolerance}"])


def costs(grid: Grid) -> str:
    """What is copied, and the step, for a sentence."""
    copies = f"copies {size_of(grid.transfers)}, " if grid.transfers else ""
    return f"{copies}step {seconds(grid.step_s)} as modelled"


def placed(situation: Situation, grid: Grid) -> list[Action]:
    """Who stands where somebody else did, and who gets back what it held."""
    before = [name for nodes in situation.running for name in nodes]
    found = []
    for slot, name in sorted(grid.here.items()):
        if name not in before:
            found.append(Action("take-place", (name,), (before[slot],)))
        elif before[slot] != name:
            found.append(Action("move", (name,), (before[slot],)))
    back = {node_of(copy.target) for copy in grid.transfers} & {
        name for slot, name in grid.here.items() if before[slot] == name
    }
    if back:
        found.append(Action("copy-back", tuple(sorted(back))))
    return found
