"""The manners in which a job can train and recover; none of them may show in a bit of its result."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from msgspec import structs

from oobleckd.planner.plan import Recompute
from oobleckd.planner.policy import ROLLING_BACK, WITH_REDUNDANT_LAYERS
from oobleckd.protocol.job import PolicyName
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.protocol.jobviews import JobView, PipelineView


@dataclass(frozen=True)
class Manner:
    """A policy, and a schedule. Two ``chunks`` a device are for a decoupled backward alone. ``check_every``:
    0, or 1, with which every mean is made twice.
    """

    policy: PolicyName = "oobleck"
    backward: Literal["fused", "decoupled"] = "fused"
    chunks: Literal[1, 2] = 1
    update: Literal["flushed", "staggered"] = "flushed"
    sum_copies: int = 0
    recompute: Recompute = "none"
    check_every: int = 1

    @property
    def form(self) -> str:
        """What a pipeline and its backward look like."""
        return self.backward if self.chunks == 1 else f"{self.backward}-{self.chunks}"

    @property
    def name(self) -> str:
        more = [*(["copies"] if self.sum_copies else []), *({self.recompute} - {"none"})]
        more += ["once"] if not self.check_every else []
        return "-".join([self.policy, self.form, self.update, *more])

    def min_nodes(self, num_devices: int, f: int) -> int:
        """That a job ``simulated`` so can begin on: f + 1 pipelines of two devices, or of two nodes where
        devices hold the layers of others.
        """
        return (f + 1) * (1 if num_devices > 1 and self.policy not in WITH_REDUNDANT_LAYERS else 2)

    def simulated(self, boundary_memory: int | str = "1GiB") -> dict[str, Any]:
        """Of ``world.make_job``: with so little memory a pipeline has two devices or more; where each holds
        for another, by request.
        """
        schedule = Schedule(self.backward, self.chunks, self.update, boundary_memory, self.sum_copies)
        schedule = structs.replace(schedule, recompute=self.recompute)
        found: dict[str, Any] = {"policy": self.policy, "schedule": schedule, "check_every": self.check_every}
        if self.policy in WITH_REDUNDANT_LAYERS:
            return {**found, "memory": 0, "min_pipeline_nodes": 2}
        memory = 470 if self.update == "staggered" else 350
        return {**found, "memory": memory + 230 * (self.sum_copies > 0)}

    def tables(self, num_devices: int = 1, *, saving: bool = False) -> dict[str, dict[str, Any]]:
        """Of job.toml, on nodes of so many devices. Without clipping a staggered update is made in every
        step; it needs a third more of state, and so does the copy that a checkpoint is written from
        (``saving``), without which a policy that rolls back would begin anew each time; copies of sums need
        two thirds.
        """
        hasty, saving = self.update == "staggered", saving or self.policy in ROLLING_BACK
        redundant = self.policy in WITH_REDUNDANT_LAYERS
        less = self.recompute == "blocks"  # with a MiB more the whole model has room on a device
        memory: dict[str, Any] = {
            "device_memory": f"{9 - less + 3 * hasty + 4 * saving + 6 * (self.sum_copies > 0)}MiB"
        }
        if redundant:  # two stages and what is run ahead
            memory = {"device_memory": "64MiB", "min_pipeline_nodes": 2 if num_devices == 1 else 1}
        schedule = {
            "backward": self.backward,
            "chunks": self.chunks,
            "update": self.update,
            "sum_copies": self.sum_copies,
            "recompute": self.recompute,
        }
        return {
            "fault_tolerance": {"policy": self.policy, "check_every": self.check_every},
            "schedule": schedule | ({"redundant_memory": "16MiB"} if redundant else {}),
            "optimizer": {"clip_norm": 0.0} if hasty else {},
            "resources": memory,
            "checkpoint": {"every": 3 if saving else 0},
        }

    def check(self, job: JobView) -> None:
        """The pipelines of a running job are as they are to be (``check_pipelines``)."""
        self.check_pipelines(job.id, job.pipelines)

    def check_pipelines(self, job: str, pipelines: Sequence[PipelineView]) -> None:
        """As many stages on every device as it is to have, in pipelines of two devices or more.

        Two chunks take twice as many layers as devices: a deeper pipeline, which a policy that chooses the
        depth may prefer, has one (docs/schedules.md, "Two chunks").
        """
        for pipeline in pipelines:
            stages = [stage.device for stage in pipeline.stages]
            num_devices, num_layers = len(set(stages)), max(stage.stop for stage in pipeline.stages)
            chunks = self.chunks if self.chunks * num_devices <= num_layers else 1
            assert len(stages) == chunks * num_devices, f"{job}: stages on {stages}"
            assert num_devices > 1, f"{job}: one device alone"


FORMS: tuple[tuple[Literal["fused", "decoupled"], Literal[1, 2]], ...] = (
    ("fused", 1),
    ("decoupled", 1),
    ("decoupled", 2),
)


def forms_of(policy: PolicyName) -> tuple[tuple[Literal["fused", "decoupled"], Literal[1, 2]], ...]:
    """The forms that go with ``policy``: a device that holds for one successor has one part of a pipeline."""
    return tuple(form for form in FORMS if form[1] == 1 or policy not in WITH_REDUNDANT_LAYERS)


UPDATES: tuple[Literal["flushed", "staggered"], ...] = ("flushed", "staggered")
KEPT = (0, 5, "1GiB")
"""Bytes for what a device sent: none, too few (of a message in the simulation one), enough."""
SUM_COPIES = (0, 3)
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "blocks")
MANNERS = tuple(
    Manner(
        policy,
        *form,
        update,
        SUM_COPIES[(turn + at + late) % 2],
        RECOMPUTES[(turn + at + 2 * late) % 3],
        check_every=(turn + late) % 2,
    )
    for turn, policy in enumerate(get_args(PolicyName))
    for at, form in enumerate(forms_of(policy))
    for late, update in enumerate(UPDATES)
)
"""Every policy, form and update. Half of them copy sums, two thirds compute blocks again, and half make each
mean once, in turns, so that this meets each of those.
"""
KEEPING = tuple(policy for policy in get_args(PolicyName) if policy not in ROLLING_BACK)
"""Policies under which no step is lost while every layer has a copy."""
KEEPING_MANNERS = tuple(manner for manner in MANNERS if manner.policy in KEEPING)
BY_NAME = {manner.name: manner for manner in MANNERS}


def manner_of(seed: int) -> Manner:
    """That of a run of ``seed``."""
    return random.Random(f"manner {seed}").choice(MANNERS)
