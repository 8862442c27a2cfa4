"""What policies say of their plans, for people: the wording, in ``reasons.txt``. What a plan is, other tests
ask by its codes.

``python -m tests.unit.planner.test_reasons`` writes the page anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from oobleckd.planner.plan import Plan, node_of
from oobleckd.planner.policies import adapt, prepare
from oobleckd.planner.policies.cases import phrase
from oobleckd.planner.policy import Action, ActionKind, Proposal, Setup, Situation
from tests.unit.planner.build import even_profile, setup_of
from tests.unit.planner.test_adaptive import moving, stepwise
from tests.unit.planner.test_bamboo import threes
from tests.unit.planner.test_oobleck import n0_of_2

PAGE = Path(__file__).with_name("reasons.txt")
ONE, TWO, MANY = ("a",), ("a", "c"), tuple(f"n{number}" for number in range(8))
ALONE: tuple[ActionKind, ...] = ("drop", "shrink", "reshape", "join", "copy-back")
OTHERS: tuple[ActionKind, ...] = ("replace", "borrow", "take-place", "move")
AROUND: tuple[ActionKind, ...] = ("re-route", "take-over")
ACTIONS = (
    Action("start"), Action("keep"), Action("rebalance"),
    *(Action(kind, nodes) for kind in ALONE for nodes in (ONE, TWO)),
    Action("merge", TWO), Action("merge", MANY),
    *(Action(kind, ONE, ("b",)) for kind in OTHERS),
    *(Action(kind, nodes, ("b",)) for kind in AROUND for nodes in ((), ONE, TWO)),
)  # fmt: skip


def said(policy: str, setup: Setup, plan: Plan, nodes: str, **more: float) -> Proposal:
    held = {device: layers for device, layers in plan.holdings().items() if node_of(device) in nodes}
    running = tuple(pipeline.nodes for pipeline in plan.pipelines)
    return adapt(policy, setup, prepare(policy, setup), Situation(tuple(nodes), held, running, **more))


class Story:
    """A job of ``policy`` that began on ``nodes``, and what is said of it."""

    def __init__(self, policy: str, setup: Setup, nodes: str, plan: Plan | None = None) -> None:
        self.policy, self.setup = policy, setup
        self.first = said(policy, setup, Plan(()), nodes)
        self.plan = plan or self.first.plan

    def then(self, nodes: str, **more: Any) -> Proposal:
        """With ``nodes``, of which others than before are here, and what has come so stays."""
        found = said(self.policy, self.setup, self.plan, nodes, **more)
        self.plan = found.plan
        return found

    def but(self, nodes: str, **more: Any) -> Proposal:
        """As ``then``; and it has not come so."""
        return said(self.policy, self.setup, self.plan, nodes, **more)


def oobleck() -> Iterator[Proposal]:
    story = Story("oobleck", n0_of_2(), "abcdefg")
    yield story.first
    yield from (story.but(nodes) for nodes in ("abcdefg", "abcdeg", "cdefg", "abcdefgxy"))
    yield Story("oobleck", n0_of_2(f=1, max_nodes=5), "abcde").but("acde")
    yield from (Story("oobleck", n0_of_2(f=1, max_nodes=4), "abcd").but(nodes) for nodes in ("acd", "acdx"))
    tight = setup_of(even_profile(5), device_memory_bytes=880, num_micro_batches=9, max_nodes=8)
    yield Story("oobleck", tight, "abcdefgh").but("abdefgh")
    three = setup_of(even_profile(3), device_memory_bytes=240, f=1, max_nodes=5)
    yield Story("oobleck", three, "abcde").first
    ones = setup_of(even_profile(2), f=0, num_micro_batches=13, max_nodes=13)
    yield Story("oobleck", ones, "abcdefghijklm").first


def slipstream() -> Iterator[Proposal]:
    story = Story("slipstream", n0_of_2(max_nodes=6), "abcdef")
    yield story.first
    yield story.but("abcdef")
    yield story.then("abcde")
    yield from (story.but(nodes) for nodes in ("abcdef", "abcdex"))
    yield Story("slipstream", n0_of_2(max_nodes=8, f=3), "abcdefgh").but("abcegh")
    heavy = setup_of(
        even_profile(8, params=10**9), device_memory_bytes=4 * 18 * 10**9 + 160, num_micro_batches=12,
        f=3, max_nodes=8,
    )  # fmt: skip
    yield Story("slipstream", heavy, "abcdefgh").but("abcegh")
    roomy = n0_of_2(max_nodes=12, f=5, device_memory_bytes=0, min_nodes=2)
    yield Story("slipstream", roomy, "abcdefghijkl").but("abcegikl")


def bamboo() -> Iterator[Proposal]:
    story = Story("bamboo", threes(), "abcdef")
    yield story.first
    yield from (story.but(nodes) for nodes in ("acdef", "acdefx", "adef", "def"))
    yield Story("bamboo", threes(max_nodes=8, min_nodes=4), "abcdefgh").but("acefgh")


def varuna() -> Iterator[Proposal]:
    yield Story("varuna", n0_of_2(), "abcdefg").first
    yield Story("varuna", n0_of_2(), "ab").first
    story = Story("varuna", n0_of_2(), "abcd")
    yield from (story.but(nodes) for nodes in ("abcd", "abcdef", "abc"))
    slow = setup_of(even_profile(8, params=10**9), num_micro_batches=12, max_nodes=6, min_nodes=2)
    yield Story("varuna", slow, "abcd").but("abcdef")


def adaptive() -> Iterator[Proposal]:
    story = Story("adaptive", moving(), "abcdefghijkl")
    yield story.but("abcdefghijklwxyz", horizon_steps=2)
    yield story.but("abcdefghijklwxyz", horizon_steps=1e6)
    yield story.but("abcdefghijk", horizon_steps=1e6, redo_s=30.0)
    yield story.then("abcdefghijk", horizon_steps=2)
    yield from (story.but(f"abcdefghijk{node}", horizon_steps=1e5) for node in "xl")
    yield Story("adaptive", moving(f=2), "abcdefghijklmno").but("abcdefghijklmn", horizon_steps=1)
    risky = Story("adaptive", moving(f=0, max_nodes=5), "abcdefghi")
    gone = risky.plan.pipelines[-1].nodes[-1]
    yield risky.but("abcdefghi".replace(gone, ""), horizon_steps=1, redo_s=1e5)
    setup, plan = stepwise(1.6)
    waits = Story("adaptive", setup, "abcdefghijkl", plan)
    waits.then("abcdefghijk", horizon_steps=1)
    yield waits.but("abcdefghijkx", horizon_steps=1e5)


def page() -> str:
    parts = ["actions", *(f"  {phrase(action)}" for action in ACTIONS)]
    for policy in (oobleck, slipstream, bamboo, varuna, adaptive):
        parts += ["", policy.__name__]
        for found in policy():
            assert found.plan.reason == found.reason
            parts.append(f"  {found.reason}")
            if found.summary:
                parts.append(f"    in short: {found.summary}")
            parts += [f"    not {other.what}: {other.why}" for other in found.rejected]
    return "\n".join(parts) + "\n"


def test_every_action_has_words() -> None:
    assert {action.kind for action in ACTIONS} == set(get_args(ActionKind))


def test_the_wording_of_reasons() -> None:
    assert page() == PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
