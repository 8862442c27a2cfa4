"""What is said of a recovery, and of one that would follow, for people: the wording, in ``incidents.txt``.
What policies say of their plans is in ``tests/unit/planner/reasons.txt``.

``python -m tests.unit.core.test_incident_words`` writes the page anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from oobleckd.core.incident import back_words, sentence
from oobleckd.protocol.incidentviews import ReasonView, RollbackView
from tests.unit.core.test_watching import impact, running

PAGE = Path(__file__).with_name("incidents.txt")


def reasons() -> Iterator[str]:
    back, plan, rerouted = "job-1: lost n02; back 3 steps to the checkpoint of step 4", "the plan", ("n02/0",)
    yield sentence(ReasonView(plan=plan))
    yield sentence(ReasonView(back, plan))
    yield sentence(ReasonView(plan=plan, staged_bytes=480))
    yield sentence(ReasonView(plan=plan, staged_bytes=48_000_000))
    yield sentence(ReasonView(rerouted=rerouted))
    yield sentence(ReasonView(back, plan, (*rerouted, "n03/0"), 480))


def rollbacks() -> Iterator[str]:
    yield back_words(RollbackView(4, 3, "/c/step-00000004"), 0, trusted=True)
    yield back_words(RollbackView(4, 1, "/c/step-00000004"), 4, trusted=True)
    yield back_words(RollbackView(0, 3, "init"), 0, trusted=False)
    yield back_words(RollbackView(0, 3, "init"), 0, trusted=True)


def impacts() -> Iterator[str]:
    world = running(max_nodes=4)
    yield impact(world, "n06").reason
    world = running()
    yield impact(world, *(pipeline.nodes[0] for pipeline in world.view().pipelines)).reason
    yield impact(world, *(f"n0{number}" for number in range(1, 6))).reason
    yield impact(running(policy="varuna", every=10), "n01").reason
    world = running(4, f=0, policy="bamboo", min_pipeline_nodes=4, memory=0)
    yield impact(world, "n01").reason
    yield impact(world, "n01", "n02").reason


def page() -> str:
    parts = []
    for title, lines in (("reasons", reasons()), ("rollbacks", rollbacks()), ("impacts", impacts())):
        parts += [title, *(f"  {line}" for line in lines), ""]
    return "\n".join(parts)


def test_the_wording_of_incidents() -> None:
    assert page() == PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
