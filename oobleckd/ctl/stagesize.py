"""How many devices a stage of a job has: as the job asks, or each number planned, and the best taken.

Owns the worlds that are compared; which one is the best is the planner's to say (``planner.costs.sharded``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oobleckd.ctl.world import PlannedWorld
from oobleckd.planner.costs.sharded import StageOption, best, possible
from oobleckd.planner.plan import Plan
from oobleckd.planner.policy import PlanError
from oobleckd.protocol.forecast import StagesBecause


@dataclass(frozen=True, slots=True)
class SizedWorld:
    """A world with the number of devices a stage that was taken, ``because`` of what, and what the others
    would be (none: nobody compared).
    """

    world: PlannedWorld
    devices_per_stage: int
    because: StagesBecause = ""
    options: tuple[StageOption, ...] = ()


def fastest_world(devices_per_node: int, f: int, make: Callable[[int], PlannedWorld]) -> SizedWorld:
    """Of the worlds that ``make`` makes for each number of devices a stage the one whose plan is best.

    Raises PlanError where none has a plan: of the number that fits the fewest nodes, or else of the largest.
    """
    worlds: dict[int, PlannedWorld] = {}
    options, errors = [], {}
    for number in possible(devices_per_node):
        try:
            worlds[number] = world = make(number)
            options.append(StageOption(number, world.n0))
            options[-1] = _option(number, world, world.start())
        except PlanError as error:
            errors[number] = error
            if number not in worlds:
                options.append(StageOption(number, 0))
    chosen = best(options, f)
    if chosen is None:
        closest = min(options, key=lambda o: (not o.n0, o.n0, -o.devices_per_stage)).devices_per_stage
        raise errors[closest]
    number = chosen.devices_per_stage
    return SizedWorld(worlds[number], number, _because(chosen, options), tuple(options))


def _option(number: int, world: PlannedWorld, plan: Plan) -> StageOption:
    return StageOption(number, world.n0, plan.step_s, world.most_bytes(plan), world.can_lose(plan))


def _because(chosen: StageOption, options: list[StageOption]) -> StagesBecause:
    others = [option for option in options if option.step_s and option is not chosen]
    if not others:
        return "only"
    return "can-lose" if any(option.step_s < chosen.step_s for option in others) else "fastest"
