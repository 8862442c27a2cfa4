"""The job's states as one table: (state, trigger) -> state. docs/states.md is drawn from it.

Owns which moves exist. Does not own why they happen (``jobs``, ``steer``, ``recovery``).

Triggers: ``start`` a free place; ``prepare`` the same, for a job whose data is to be prepared first;
``prepared`` it is; ``measured`` the profile is here; ``planned`` a plan is being deployed;
``deployed`` all devices are ready; ``loss`` a node of the plan is lost; ``replan`` nodes come or go in
order; ``starve`` too few nodes; ``feed`` enough again; ``hold`` all devices stopped for a pause; ``unhold``
the pause is over; ``finish``, ``fail``, ``cancel``.
"""

from __future__ import annotations

from typing import Literal

from oobleckd.protocol.jobviews import JobState
from oobleckd.words import being

Trigger = Literal[
    "start", "prepare", "prepared", "measured", "planned", "deployed", "loss", "replan", "starve", "feed",
    "hold", "unhold", "finish", "fail", "cancel",
]  # fmt: skip

FINAL: frozenset[JobState] = frozenset({"done", "failed", "cancelled"})

ACTIVE: tuple[JobState, ...] = (
    "queued", "preparing", "profiling", "planning", "deploying", "running", "recovering", "waiting", "paused",
)  # fmt: skip

TABLE: dict[tuple[JobState, Trigger], JobState] = {
    ("queued", "start"): "profiling",
    ("queued", "prepare"): "preparing",
    ("preparing", "prepared"): "profiling",
    ("profiling", "measured"): "planning",
    ("planning", "planned"): "deploying",
    ("planning", "starve"): "waiting",
    ("planning", "loss"): "planning",
    ("deploying", "deployed"): "running",
    ("deploying", "loss"): "recovering",
    ("deploying", "replan"): "planning",
    ("deploying", "starve"): "waiting",
    ("running", "replan"): "deploying",
    ("running", "loss"): "recovering",
    ("running", "hold"): "paused",
    ("running", "starve"): "waiting",
    ("running", "finish"): "done",
    ("recovering", "loss"): "recovering",
    ("recovering", "planned"): "recovering",
    ("recovering", "deployed"): "running",
    ("recovering", "starve"): "waiting",
    ("recovering", "hold"): "paused",
    ("recovering", "finish"): "done",
    ("waiting", "loss"): "waiting",
    ("waiting", "starve"): "waiting",
    ("waiting", "feed"): "planning",
    ("waiting", "hold"): "paused",
    ("planning", "hold"): "paused",
    ("paused", "loss"): "recovering",
    ("paused", "unhold"): "running",
}
for _state in ACTIVE:
    TABLE[_state, "fail"] = "failed"
    TABLE[_state, "cancel"] = "cancelled"


def after(state: JobState, trigger: Trigger) -> JobState:
    """The state that ``trigger`` leads to. A move that is not in the table is a bug."""
    assert (state, trigger) in TABLE, f"a job that {being(state)} has no move {trigger!r}"
    return TABLE[state, trigger]


def mermaid() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> queued"]
    lines += [f"    {state} --> {target}: {trigger}" for (state, trigger), target in TABLE.items()]
    lines += [f"    {state} --> [*]" for state in sorted(FINAL)]
    return "\n".join(lines) + "\n"
