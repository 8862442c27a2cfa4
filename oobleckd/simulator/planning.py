"""The planner as the core asks it: at once, in this process, and remembered where that is the same question.

Owns what is remembered: templates by policy and set-up, and sizes by number of nodes, as the daemon's pool
keeps them. Schedules of plans that are whole are not made: the simulator runs no op, and the core looks at
them only where routes cross.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from oobleckd.core.events import MakePlan, Planned
from oobleckd.planner.plan import Template
from oobleckd.planner.policies import deployable, policy
from oobleckd.planner.policies.stagesize import chosen
from oobleckd.planner.policy import PlanError, Setup
from oobleckd.planner.sizing.exchanged import reduce_s_of
from oobleckd.planner.sizing.instantiate import instantiate

Key = tuple[str, Setup]


@dataclass(slots=True)
class Planner:
    """All that is remembered between plans."""

    _templates: dict[Key, tuple[Template, ...]] = field(default_factory=dict)
    _sizes: dict[tuple[Key, int], tuple[int, ...]] = field(default_factory=dict)

    def templates(self, name: str, setup: Setup) -> tuple[Template, ...]:
        """Those that the policy makes. Raises PlanError."""
        key = (name, setup)
        if key not in self._templates:
            self._templates[key] = policy(name).prepare(setup)
        return self._templates[key]

    def answer(self, request: MakePlan, *, precopy: bool = True) -> Planned:
        """What the daemon's pool would answer. Never raises: what is wrong is in the answer. Without
        ``precopy`` all copies are made in stops.
        """
        try:
            setups = (request.setup, *request.others)
            setup = setups[chosen(request.policy, setups, request.num_nodes) if request.others else 0]
            templates = self.templates(request.policy, setup)
            if request.situation is None:
                return Planned(request.ticket, templates, setup=setup if request.others else None)
            sizes = self._sizes_for(request, templates, len(set(request.situation.nodes)))
            found = deployable(request.policy, setup, templates, request.situation, sizes, ordered=False)
        except PlanError as error:
            return Planned(request.ticket, error=error.problem, hint=error.hint)
        if not precopy:
            found = msgspec.structs.replace(found, precopy_s=0.0, at_once=False)
        return Planned(request.ticket, templates, found)

    def _sizes_for(
        self, request: MakePlan, templates: tuple[Template, ...], num_nodes: int
    ) -> tuple[int, ...]:
        key = ((request.policy, request.setup), num_nodes)
        if key not in self._sizes:
            setup = request.setup
            reduce_s = reduce_s_of(setup, templates, num_nodes)
            found = instantiate(templates, num_nodes, setup.f, setup.num_micro_batches, reduce_s)
            self._sizes[key] = found.sizes
        return self._sizes[key]


@dataclass(slots=True)
class Oracle:
    """Who has the best plan for whoever is alive at once and at no cost: the bound that no policy reaches.

    ``templates``: those of pipelines for all numbers of nodes; it keeps no replica that it does not need. A
    plan that goes around vacant places is not among those that it chooses from.
    """

    setup: Setup
    templates: tuple[Template, ...]
    _steps: dict[int, float] = field(default_factory=dict)
    _best: dict[int, float] = field(default_factory=dict)

    def step_s(self, num_nodes: int) -> float:
        """Seconds of a step on ``num_nodes`` nodes, of which it may leave some idle; inf where the model does
        not fit them.
        """
        max_nodes = min(num_nodes, self.setup.max_nodes or num_nodes)
        n0 = min(template.num_nodes for template in self.templates)
        if max_nodes not in self._best:
            used = range(max(n0, max_nodes - n0), max_nodes + 1)
            self._best[max_nodes] = min(map(self._of_all, used), default=float("inf"))
        return self._best[max_nodes]

    def _of_all(self, num_nodes: int) -> float:
        if num_nodes not in self._steps:
            reduce_s = reduce_s_of(self.setup, self.templates, num_nodes)
            found = instantiate(self.templates, num_nodes, 0, self.setup.num_micro_batches, reduce_s)
            self._steps[num_nodes] = found.step_s
        return self._steps[num_nodes]
