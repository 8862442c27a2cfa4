"""How many devices a stage of a job is given, where the job leaves it open: each number planned, the best
taken; again when other nodes are there.

Owns what is compared; which of them is the best is ``costs.sharded``'s to say.
"""

from __future__ import annotations

from collections.abc import Sequence

from oobleckd.planner.costs.sharded import StageOption, best
from oobleckd.planner.plan import Plan, Template
from oobleckd.planner.policies import prepare, proposed
from oobleckd.planner.policy import ROLLING_BACK, PlanError, Setup, Situation
from oobleckd.planner.templates.guarantee import losses_survived


def chosen(policy: str, setups: Sequence[Setup], num_nodes: int = 0) -> int:
    """Which of ``setups``, of one job with other numbers of devices a stage, plans best for the nodes that
    there were when it was prepared. Raises PlanError where none has a plan: of the number that fits the
    fewest nodes, or else of the largest. ``num_nodes``: for so many instead; the first of ``setups`` is the
    one that the job has.
    """
    options, errors = [], {}
    for index, setup in enumerate(setups):
        each = setup.profile.devices_per_stage
        try:
            templates = prepare(policy, setup)
        except PlanError as error:
            errors[index] = error
            options.append(StageOption(each, 0))
            continue
        options.append(StageOption(each, min(template.num_nodes for template in templates)))
        try:
            options[-1] = _planned(policy, setup, templates, num_nodes or setup.nodes_now)
        except PlanError as error:
            errors[index] = error
    found = best(options, setups[0].f, options[0] if num_nodes else None)
    if found is not None:
        return options.index(found)
    of_equals = 1 if num_nodes else -1  # the present number, or the largest
    closest = min(range(len(options)), key=lambda i: (not options[i].n0, options[i].n0, of_equals * i))
    if options[closest].n0:
        return closest  # it waits for so many nodes
    raise errors[closest]


def _planned(policy: str, setup: Setup, templates: tuple[Template, ...], num_nodes: int) -> StageOption:
    nodes = tuple(f"node-{number:06}" for number in range(num_nodes))
    plan = proposed(policy, setup, templates, Situation(nodes[: setup.max_nodes or None], {})).plan
    can_lose = 0 if policy in ROLLING_BACK else losses_survived(plan.copies())
    each = setup.profile.devices_per_stage
    n0 = min(template.num_nodes for template in templates)
    return StageOption(each, n0, plan.step_s, _most_bytes(plan, templates), can_lose)


def _most_bytes(plan: Plan, templates: Sequence[Template]) -> int:
    """The most that a device of ``plan`` holds."""
    sizes = {len(pipeline.nodes) for pipeline in plan.pipelines}
    used = [template for template in templates if template.num_nodes in sizes]
    return max((stage.memory_bytes for template in used for stage in template.stages), default=0)
