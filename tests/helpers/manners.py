"""The manners in which a job can train and recover; none of them may show in a bit of its result."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any, Literal, get_args

from oobleckd.protocol.api import JobView
from oobleckd.protocol.job import PolicyName, Schedule


@dataclass(frozen=True)
class Manner:
    """A policy, and a schedule. Two ``chunks`` a device are for a decoupled backward alone."""

    policy: PolicyName = "oobleck"
    backward: Literal["fused", "decoupled"] = "fused"
    update: Literal["flushed", "staggered"] = "flushed"
    chunks: Literal[1, 2] = 1

    @property
    def form(self) -> str:
        """What a pipeline and its backward look like."""
        return self.backward if self.chunks == 1 else f"{self.backward}-{self.chunks}"

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.form}-{self.update}"

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.backward, chunks=self.chunks, update=self.update)

    def tables(self) -> dict[str, dict[str, Any]]:
        """Of job.toml. Without clipping a staggered update is made in every step; it needs a third more of state."""
        hasty = self.update == "staggered"
        return {
            "fault_tolerance": {"policy": self.policy},
            "schedule": {"backward": self.backward, "chunks": self.chunks, "update": self.update},
            "optimizer": {"clip_norm": 0.0} if hasty else {},
            "resources": {"device_memory": "13MiB"} if hasty else {},
        }

    def check(self, job: JobView) -> None:
        """A running job has as many stages on every device as it is to have, in pipelines of two devices or more."""
        for pipeline in job.pipelines:
            stages = [stage.device for stage in pipeline.stages]
            assert len(stages) == self.chunks * len(set(stages)), f"{job.id}: stages on {stages}"
            assert len(set(stages)) > 1, f"{job.id}: one device alone"


FORMS: tuple[tuple[Literal["fused", "decoupled"], Literal[1, 2]], ...] = (
    ("fused", 1),
    ("decoupled", 1),
    ("decoupled", 2),
)
MANNERS = tuple(
    Manner(policy, backward, update, chunks)
    for policy, (backward, chunks), update in itertools.product(
        get_args(PolicyName), FORMS, ("flushed", "staggered")
    )
)
BY_NAME = {manner.name: manner for manner in MANNERS}


def manner_of(seed: int) -> Manner:
    """That of a run of ``seed``."""
    return random.Random(f"manner {seed}").choice(MANNERS)
