"""Policy ``oobleck``: templates ahead, re-instantiation and copies after a loss (Oobleck, SOSP'23).

Owns the choice between two plans for the nodes at hand: the fastest sizes for all of them, and the
sizes that touch only the pipelines that were hit. Shrink, borrow and merge fall out of either; the
reason names which it was. Templates, sizes, placement and copies are the planner's other modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from oobleckd.planner.placement.transfer import (
    copy_s,
    holds,
    place,
    recompute_on,
    redundant_on,
    segments_on,
    transfers,
)
from oobleckd.planner.placement.zones import apart
from oobleckd.planner.plan import Pipeline, Plan, Template, Transfer
from oobleckd.planner.policies.cases import Nodes, phrase, pipeline_actions
from oobleckd.planner.policy import REROUTING, ROLLING_BACK, Proposal, Rejected, Setup, Situation
from oobleckd.planner.sizing.exchanged import exchanging, reduce_s_of
from oobleckd.planner.sizing.instantiate import instantiate, slowest_s, split_micro_batches, too_few, why_idle
from oobleckd.planner.sizing.shares import blocks_of, dealt_out
from oobleckd.planner.templates.fewest import fewest_recomputing
from oobleckd.planner.templates.fold import folded
from oobleckd.planner.templates.guarantee import losses_survived, max_pipelines
from oobleckd.planner.templates.refine import refined
from oobleckd.planner.templates.template import expected_share
from oobleckd.planner.templates.template import templates as make_templates
from oobleckd.words import count, noun, seconds, than

SIZES_SHOWN = 12


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A plan with its copies and modelled cost."""

    what: str
    plan: Plan
    copies: tuple[Transfer, ...]
    cost_s: float

    def rank(self) -> tuple[float, int]:
        """Less is better: cost, to the nanosecond, then pipelines."""
        return round(self.cost_s, 9), -len(self.plan.pipelines)

    @property
    def sizes(self) -> str:
        """Pipeline sizes for a sentence."""
        return sizes_of(self.plan)


class Oobleck:
    """Re-instantiation of pipeline templates."""

    name = "oobleck"
    reroutes = name in REROUTING
    rolls_back = name in ROLLING_BACK

    def prepare(self, setup: Setup) -> tuple[Template, ...]:
        """Templates for n0 .. n_max nodes. Raises PlanError when no number of nodes fits."""
        made = [(each, expected_share(setup, each.num_nodes)) for each in make_templates(setup)]
        return tuple(folded(setup, refined(setup, each, share), share) for each, share in made)

    def adapt(
        self,
        setup: Setup,
        templates: tuple[Template, ...],
        situation: Situation,
        sizes: tuple[int, ...] = (),
    ) -> Proposal:
        """The plan of least modelled cost, copies plus the steps until the next loss, on all nodes; at equal
        cost the one with more pipelines, which can lose more.

        Raises PlanError when there are fewer than n0 nodes.
        """
        moment = _Moment(setup, {template.num_nodes: template for template in templates}, situation)
        whole = moment.anew(sizes)
        local = moment.touching_only_the_hit(whole)
        if (local.sizes, local.cost_s) == (whole.sizes, whole.cost_s):
            return _proposal(moment, local, None)
        chosen, other = sorted((local, whole), key=_Candidate.rank)
        return _proposal(moment, chosen, other)


class _Moment:
    """One situation, with what follows from it."""

    def __init__(self, setup: Setup, by_size: dict[int, Template], situation: Situation) -> None:
        self.setup = setup
        self.by_size = by_size
        self.situation = situation
        self.nodes = tuple(sorted(set(situation.nodes)))
        self.n0 = min(by_size)
        if len(self.nodes) < self.n0:
            redundant = any(template.redundant for template in by_size.values())
            fewer = fewest_recomputing(setup, self.n0, redundant=redundant)
            raise too_few(len(self.nodes), self.n0, fewer)
        self.min_pipelines = max_pipelines(len(self.nodes), self.n0, setup.f)
        usable = frozenset(self.nodes)
        self.intact = tuple(
            nodes for nodes in situation.running if usable.issuperset(nodes) and self._fits_a_template(nodes)
        )

    def _fits_a_template(self, nodes: Nodes) -> bool:
        template = self.by_size.get(len(nodes))
        return template is not None and holds(template, nodes, self.situation.holdings)

    def anew(self, known: Sequence[int]) -> _Candidate:
        """The fastest sizes for all nodes (``known`` ahead, or found now), placed where the fewest bytes
        are copied.
        """
        every = len(self.nodes), self.setup.f, self.setup.num_micro_batches
        sizes = known or self._instantiate(*every, 0)
        kept, left = [], Counter(sizes)
        # A node that holds exactly what a place needs can stay in it at no loss: swapping it back costs
        # nothing there, and elsewhere at most what it saves (bytes lacked obey the triangle inequality).
        for nodes in self.intact:
            if left[len(nodes)]:
                left[len(nodes)] -= 1
                kept.append(nodes)
        return self._candidate("plan all nodes anew", kept, [*left.elements()])

    def touching_only_the_hit(self, whole: _Candidate) -> _Candidate:
        """Intact pipelines stay; what is left is planned anew. Where that leaves nodes without a place
        or too few pipelines, pipelines are opened too: the one that costs least, else the largest and
        another. With all of them open this is ``whole``, so it ends.
        """
        kept = list(self.intact)
        best = self._keeping(kept, whole)
        while best is None:
            by_size = {len(nodes): nodes for nodes in reversed(kept)}
            options = [self._keeping([k for k in kept if k != opened], whole) for opened in by_size.values()]
            best = min(filter(None, options), key=lambda candidate: candidate.cost_s, default=None)
            kept.remove(by_size[max(by_size)])
        return best

    def _keeping(self, kept: list[Nodes], whole: _Candidate) -> _Candidate | None:
        """``kept`` as they are and the other nodes anew; None if that uses fewer nodes than ``whole``
        or makes fewer pipelines than promised.
        """
        num_free = len(self.nodes) - sum(map(len, kept))
        sizes: Sequence[int] = ()
        if num_free >= self.n0:
            share = round(self.setup.num_micro_batches * num_free / len(self.nodes))
            fewest = max(0, self.min_pipelines - len(kept) - 1)
            sizes = self._instantiate(num_free, fewest, max(1, share), len(kept))
        promised = len(kept) + len(sizes) >= self.min_pipelines
        all_used = num_free - sum(sizes) <= len(whole.plan.idle)
        if not (promised and all_used):
            return None
        return self._candidate("touch only the pipelines that were hit", kept, sizes)

    def _instantiate(self, num_nodes: int, f: int, num_micro_batches: int, others: int) -> tuple[int, ...]:
        """``others``: pipelines besides."""
        made = tuple(self.by_size.values())
        reduce_s = reduce_s_of(self.setup, made, num_nodes, others)
        return instantiate(made, num_nodes, f, num_micro_batches, reduce_s).sizes

    def _candidate(self, what: str, kept: Sequence[Nodes], sizes: Sequence[int]) -> _Candidate:
        """``kept`` and new pipelines of ``sizes`` on the other nodes, with micro-batches and copies."""
        profile, holdings = self.setup.profile, self.situation.holdings
        staying = frozenset(node for nodes in kept for node in nodes)
        free = [node for node in self.nodes if node not in staying]
        made = [self.by_size[size] for size in sizes]
        new = place(made, free, holdings, profile) if made else ()
        if any(template.redundant for template in made):
            spare = sorted(set(free) - {node for nodes in new for node in nodes})
            new = apart(new, self.situation.zones, holdings, spare)
        placed = [*kept, *new]
        placed.sort(key=lambda nodes: (len(nodes), nodes))
        used = {node for nodes in placed for node in nodes}
        members = [self.by_size[len(nodes)] for nodes in placed]
        timed = exchanging(self.setup, members)
        shares = split_micro_batches(timed, self.setup.num_micro_batches)
        plan = Plan(
            pipelines=pipelines_of(members, placed, shares, dealt=self.setup.dealt),
            idle=tuple(node for node in free if node not in used),
            step_s=slowest_s(timed, shares),
            redundant=redundant_on(members, placed),
            recompute=recompute_on(members, placed),
        )
        copies = transfers(plan.holdings(), holdings, profile)
        return _Candidate(
            what, plan, copies, copy_s(copies, profile) + self.situation.horizon_steps * plan.step_s
        )


def pipelines_of(
    members: Sequence[Template], placed: Sequence[Nodes], shares: Sequence[int], *, dealt: bool
) -> tuple[Pipeline, ...]:
    """Pipelines with contiguous blocks of micro-batches; ``dealt``: with every so manieth."""
    hands = dealt_out(shares) if dealt else blocks_of(shares)
    return tuple(
        Pipeline(nodes, segments_on(template, nodes), hand)
        for template, nodes, hand in zip(members, placed, hands, strict=True)
    )


def _proposal(moment: _Moment, chosen: _Candidate, other: _Candidate | None) -> Proposal:
    planned = [pipeline.nodes for pipeline in chosen.plan.pipelines]
    actions = pipeline_actions(moment.situation.running, planned, moment.nodes)
    summary = "; ".join(map(phrase, actions))
    reason = f"{summary}; {_reason(moment, chosen)}"
    rejected: tuple[Rejected, ...] = ()
    if other is not None:
        extra_s = round(other.cost_s - chosen.cost_s, 9)
        over = steps_of(moment.situation.horizon_steps)
        why = f"{than(extra_s)} over {over}" if extra_s else "no cheaper, fewer pipelines"
        why += f": copies {size_of(other.copies)}, step {seconds(other.plan.step_s)}"
        rejected = (
            Rejected(
                f"{other.what}: {other.sizes}", other.cost_s, why, "re-instantiate",
                "cost" if extra_s else "fewer-pipelines",
                step_s=other.plan.step_s, copied_bytes=bytes_of(other.copies),
            ),
        )  # fmt: skip
    plan = msgspec.structs.replace(chosen.plan, reason=reason)
    return Proposal(
        plan, chosen.copies, chosen.cost_s, reason, rejected,
        way="re-instantiate", actions=actions, summary=summary,
    )  # fmt: skip


def _reason(moment: _Moment, chosen: _Candidate) -> str:
    """Which pipelines there are, what is copied, what can still be lost."""
    plan = chosen.plan
    parts = [f"pipelines of {nodes_of(chosen.plan)}, step {seconds(plan.step_s)} as modelled"]
    if chosen.copies:
        parts.append(f"copies {size_of(chosen.copies)}")
    parts.append(f"can lose {losses_survived(plan.copies())}")
    if plan.idle:
        why = why_idle(len(moment.nodes), moment.n0, max(moment.by_size))
        parts.append(f"{', '.join(plan.idle)} idle: {why}")
    return "; ".join(parts)


def sizes_of(plan: Plan) -> str:
    """Pipeline sizes, such as "2+2+3", or "140 of 2 and 1 of 3" where they are many."""
    sizes = [len(pipeline.nodes) for pipeline in plan.pipelines]
    if len(sizes) <= SIZES_SHOWN:
        return "+".join(map(str, sizes))
    return " and ".join(f"{count} of {size}" for size, count in sorted(Counter(sizes).items()))


def nodes_of(plan: Plan) -> str:
    """The same with their noun: "1 node", "2+2+3 nodes"."""
    sizes = sizes_of(plan)
    return f"{sizes} {noun(1 if sizes == '1' or sizes.endswith(' of 1') else 2, 'node')}"


def steps_of(horizon_steps: float) -> str:
    """Steps until the next loss, for a sentence."""
    return count(round(horizon_steps), "step")


def bytes_of(copies: Sequence[Transfer]) -> int:
    """All that is copied."""
    return sum(copy.num_bytes for copy in copies)


def size_of(copies: Sequence[Transfer]) -> str:
    """Layers and bytes for a sentence."""
    return f"{count(len(copies), 'layer')} ({amount_of(copies)})"


def amount_of(copies: Sequence[Transfer]) -> str:
    """Bytes for a sentence."""
    num_bytes = bytes_of(copies)
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,} bytes"
