"""Names for what a new plan does to the pipelines that ran: shrink, borrow, merge and their kin.

Owns the words that the reason of a proposal begins with. Changes no plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

Nodes = tuple[str, ...]


def name_cases(
    running: Sequence[Nodes], planned: Sequence[Nodes], usable: Collection[str]
) -> tuple[str, ...]:
    """One phrase for each pipeline that was hit and for the nodes that join, in running order.

    ``running``: pipelines before, dead nodes still named; ``planned``: after; ``usable``: nodes that
    may be used. A running pipeline was hit when one of its nodes is not usable.
    """
    if not running:
        return ("start",)
    alive = frozenset(usable)
    hit = [nodes for nodes in running if not alive.issuperset(nodes)]
    cases = list(dict.fromkeys(_name_hit(nodes, running, planned, alive) for nodes in hit))
    phrases = [f"{case}: {what}" for case, what in cases]
    before = frozenset(node for nodes in running for node in nodes)
    joining = [node for nodes in planned for node in nodes if node not in before]
    if joining and not any(case == "replace" for case, _ in cases):
        phrases.append(f"join: {listed(joining)}")
    if not phrases:
        same = {frozenset(nodes) for nodes in running} == {frozenset(nodes) for nodes in planned}
        phrases.append("keep: no pipeline changes" if same else "rebalance")
    return tuple(phrases)


def _name_hit(
    nodes: Nodes, running: Sequence[Nodes], planned: Sequence[Nodes], alive: frozenset[str]
) -> tuple[str, str]:
    """What became of the survivors of a pipeline that was hit: the case, and who is in it."""
    survivors = frozenset(nodes) & alive
    if not survivors:
        return "drop", f"{listed(nodes)} {'are' if len(nodes) > 1 else 'is'} gone"
    left = listed(sorted(survivors))
    hosts = [frozenset(pipeline) for pipeline in planned if survivors.intersection(pipeline)]
    if hosts == [survivors]:
        return "shrink", f"{left} {'go' if len(survivors) > 1 else 'goes'} on without the others"
    if len(hosts) != 1 or not survivors <= hosts[0]:
        return "reshape", f"{left} {'are' if len(survivors) > 1 else 'is'} placed anew"
    guests = hosts[0] - survivors
    donors = [frozenset(other) & alive for other in running if other != nodes and guests.intersection(other)]
    if not donors:
        return "replace", f"{listed(sorted(guests))} for what {left} lost"
    if all(donor <= hosts[0] for donor in donors):
        return "merge", f"{listed(sorted(hosts[0]))} become one pipeline"
    return "borrow", f"{listed(sorted(guests))} from another pipeline for {left}"


def listed(nodes: Sequence[str]) -> str:
    """Names for a sentence; long lists are cut."""
    shown = [*nodes[:4], f"{len(nodes) - 4} more"] if len(nodes) > 5 else list(nodes)
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
