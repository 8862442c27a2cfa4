"""Names for what a new plan does to the pipelines that ran: shrink, borrow, merge and their kin.

Owns the actions that are told of a proposal, and the words for each. Changes no plan.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import assert_never

from oobleckd.planner.policy import Action, Way

Nodes = tuple[str, ...]
NOWHERE: Mapping[str, int] = {}


def pipeline_actions(
    running: Sequence[Nodes], planned: Sequence[Nodes], usable: Collection[str]
) -> tuple[Action, ...]:
    """One for each pipeline that was hit and for the nodes that join, in running order.

    ``running``: pipelines before, dead nodes still named; ``planned``: after; ``usable``: nodes that
    may be used. A running pipeline was hit when one of its nodes is not usable.
    """
    if not running:
        return (Action("start"),)
    alive = frozenset(usable)
    hit = [nodes for nodes in running if not alive.issuperset(nodes)]
    actions = list(dict.fromkeys(_of_hit(nodes, running, planned, alive) for nodes in hit))
    before = frozenset(node for nodes in running for node in nodes)
    joining = tuple(node for nodes in planned for node in nodes if node not in before)
    if joining and not any(action.kind == "replace" for action in actions):
        actions.append(Action("join", joining))
    if not actions:
        same = {frozenset(nodes) for nodes in running} == {frozenset(nodes) for nodes in planned}
        actions.append(Action("keep" if same else "rebalance"))
    return tuple(actions)


def _of_hit(
    nodes: Nodes, running: Sequence[Nodes], planned: Sequence[Nodes], alive: frozenset[str]
) -> Action:
    """What became of the survivors of a pipeline that was hit."""
    survivors = frozenset(nodes) & alive
    if not survivors:
        return Action("drop", nodes)
    left = tuple(sorted(survivors))
    hosts = [frozenset(pipeline) for pipeline in planned if survivors.intersection(pipeline)]
    if hosts == [survivors]:
        return Action("shrink", left)
    if len(hosts) != 1 or not survivors <= hosts[0]:
        return Action("reshape", left)
    guests = tuple(sorted(hosts[0] - survivors))
    donors = [frozenset(other) & alive for other in running if other != nodes and set(guests) & set(other)]
    if not donors:
        return Action("replace", guests, left)
    if all(donor <= hosts[0] for donor in donors):
        return Action("merge", tuple(sorted(hosts[0])))
    return Action("borrow", guests, left)


def way_of(actions: Collection[Action]) -> Way:
    """What a plan is in which the pipelines at work stay, with such actions."""
    kinds = {action.kind for action in actions}
    if kinds & {"take-place", "copy-back"}:
        return "fill"
    if "take-over" in kinds:
        return "take-over"
    return "re-route" if kinds & {"move", "re-route"} else "stay"


# ---------------------------------------------------------------------- words


def phrase(action: Action, homes: Mapping[str, int] = NOWHERE) -> str:  # noqa: C901, PLR0911, PLR0912 - a line each
    """``action`` in words; of who is in ``homes`` with its pipeline."""
    named = [f"{node} (pipeline {homes[node]})" if node in homes else node for node in action.nodes]
    who, whose, more = listed(named), listed(action.whose), len(named) > 1
    match action.kind:
        case "start" | "rebalance":
            return action.kind
        case "keep":
            return "keep: no pipeline changes"
        case "drop":
            return f"drop: {who} {'are' if more else 'is'} gone"
        case "shrink":
            return f"shrink: {who} {'go' if more else 'goes'} on without the others"
        case "reshape":
            return f"reshape: {who} {'are' if more else 'is'} placed anew"
        case "replace":
            return f"replace: {who} for what {whose} lost"
        case "merge":
            return f"merge: {who} become one pipeline"
        case "borrow":
            return f"borrow: {who} from another pipeline for {whose}"
        case "join":
            return f"join: {who}"
        case "take-place":
            return f"{who} takes {whose}'s place"
        case "move":
            return f"{who} moves to {whose}'s place, where more is lost"
        case "copy-back":
            return f"{who} {'get' if more else 'gets'} back what was held"
        case "re-route" | "take-over" if not action.nodes:
            return f"{whose} had no micro-batch"
        case "re-route":
            return f"{whose}'s micro-batches go to {who}"
        case "take-over":
            return f"{who}, which held the layers of {whose}, {'do' if more else 'does'} its work too"
        case _:
            assert_never(action.kind)


def listed(nodes: Sequence[str]) -> str:
    """Names for a sentence; long lists are cut."""
    shown = [*nodes[:4], f"{len(nodes) - 4} more"] if len(nodes) > 5 else list(nodes)
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))) if shown else ""
