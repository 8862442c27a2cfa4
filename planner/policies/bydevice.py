"""Turns a policy's proposal, which is of places, into one that devices can be told.

Owns the copies and schedules that it then has, and what is said of shards that are given back. Which names
and micro-batches those are is ``placement.lanes``'.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.placement.transfer import copy_s, transfers
from oobleckd.planner.plan import Layers, Plan, Transfer, node_of, shard_rank
from oobleckd.planner.policies.cases import phrase
from oobleckd.planner.policies.oobleck import amount_of, size_of
from oobleckd.planner.policy import Action, Proposal, Setup, Situation
from oobleckd.planner.profile import Profile
from oobleckd.words import count


def by_device(setup: Setup, planned: Proposal, situation: Situation) -> Proposal:
    """``planned`` with copies and schedules of devices, which hold what ``situation`` says. Its plan stays
    one of places and turns (``Lanes.layout``).
    """
    lanes = Lanes.of(setup)
    if lanes.devices_per_stage == 1:
        return planned
    profile = setup.profile
    copies = transfers_by_rank(lanes, planned.plan, situation.holdings, profile)
    more_s = max(0.0, copy_s(copies, profile) - copy_s(planned.transfers, profile))
    found = msgspec.structs.replace(
        planned, transfers=copies, ops=lanes.ops(planned.ops), cost_s=planned.cost_s + more_s
    )
    known = {copy.target for copy in planned.transfers}
    given_back = tuple(copy for copy in copies if lanes.place(copy.target) not in known)
    return _giving_back(found, given_back) if given_back else found


def resharded(setup: Setup, planned: Proposal, situation: Situation) -> Proposal:
    """``planned``, from nothing, with copies for stages of another number of devices than those that hold
    what ``situation`` says; all of what a device is to have, but for what it has.
    """
    lanes, profile, before = Lanes.of(setup), setup.profile, situation.held_per_stage
    copies = transfers_between(lanes, planned.plan, situation.holdings, before, profile)
    each = count(lanes.devices_per_stage, "device")
    text = f"stages of {each} in place of {before}, {amount_of(copies)} copied"
    began = f"{phrase(Action('start'))}; "
    reason = f"{text}; {planned.reason.removeprefix(began)}"
    return msgspec.structs.replace(
        planned,
        plan=msgspec.structs.replace(planned.plan, reason=reason),
        transfers=copies,
        ops=lanes.ops(planned.ops),
        cost_s=planned.cost_s + copy_s(copies, profile),
        reason=reason,
        precopy_s=0.0,
        actions=(Action("rebalance"),),
        way="re-instantiate",
        summary=text,
    )


def transfers_between(
    lanes: Lanes, plan: Plan, holdings: Mapping[str, Layers], held_per_stage: int, profile: Profile
) -> tuple[Transfer, ...]:
    """Copies that give every device of ``plan`` its shards from ``holdings`` (of devices), where so many held
    a stage: something of each of their shards that it lacks. Sorted by target, layer and source.
    """
    wanted = lanes.holdings(plan)
    parts = lanes.devices_per_stage * held_per_stage
    copies = [
        msgspec.structs.replace(copy, num_bytes=-(-copy.num_bytes // parts))
        for rank in range(held_per_stage)
        for copy in transfers(wanted, _of_rank(holdings, rank, held_per_stage), profile)
    ]
    return tuple(sorted(copies, key=lambda copy: (copy.target, copy.layer, copy.source)))


def transfers_by_rank(
    lanes: Lanes, plan: Plan, holdings: Mapping[str, Layers], profile: Profile
) -> tuple[Transfer, ...]:
    """Copies that give every device of ``plan`` its shards from ``holdings`` (of devices): each from one of
    its own rank, a part of a layer's bytes. Sorted by target and layer.
    """
    g, wanted = lanes.devices_per_stage, lanes.holdings(plan)
    copies = [
        msgspec.structs.replace(copy, num_bytes=-(-copy.num_bytes // g))
        for rank in range(g)
        for copy in transfers(_of_rank(wanted, rank, g), _of_rank(holdings, rank, g), profile)
    ]
    return tuple(sorted(copies, key=lambda copy: (copy.target, copy.layer)))


def _of_rank(holdings: Mapping[str, Layers], rank: int, devices_per_stage: int) -> dict[str, Layers]:
    return {
        device: layers for device, layers in holdings.items() if shard_rank(device, devices_per_stage) == rank
    }


def _giving_back(found: Proposal, copies: tuple[Transfer, ...]) -> Proposal:
    """``found`` says, too, that devices get the shards that were lost with those before them."""
    nodes = tuple(sorted({node_of(copy.target) for copy in copies}))
    action = Action("copy-back", nodes)
    text = f"{phrase(action)}, shards of {size_of(copies)}"
    reason = f"{text}; {_without_keep(found.reason)}"
    return msgspec.structs.replace(
        found,
        plan=msgspec.structs.replace(found.plan, reason=reason),
        reason=reason,
        actions=(*(each for each in found.actions if each.kind != "keep"), action),
        way="fill" if found.way == "stay" else found.way,
        summary=f"{text}; {found.summary}" if found.summary else "",
    )


def _without_keep(reason: str) -> str:
    """``reason``, which does not say any more that nothing happens."""
    return reason.removeprefix("stay: ").replace(f"{phrase(Action('keep'))}; ", "", 1)
