"""The manners in which a job can train and recover; none of them may show in a bit of its result."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any, Literal, get_args

from oobleckd.protocol.job import PolicyName


@dataclass(frozen=True)
class Manner:
    """A policy, and a schedule."""

    policy: PolicyName = "oobleck"
    backward: Literal["fused", "decoupled"] = "fused"
    update: Literal["flushed", "staggered"] = "flushed"

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.backward}-{self.update}"

    def tables(self) -> dict[str, dict[str, Any]]:
        """Of job.toml. Without clipping a staggered update is made in every step; it needs a third more of state."""
        hasty = self.update == "staggered"
        return {
            "fault_tolerance": {"policy": self.policy},
            "schedule": {"backward": self.backward, "update": self.update},
            "optimizer": {"clip_norm": 0.0} if hasty else {},
            "resources": {"device_memory": "13MiB"} if hasty else {},
        }


MANNERS = tuple(
    Manner(*values)
    for values in itertools.product(get_args(PolicyName), ("fused", "decoupled"), ("flushed", "staggered"))
)
BY_NAME = {manner.name: manner for manner in MANNERS}


def manner_of(seed: int) -> Manner:
    """That of a run of ``seed``."""
    return random.Random(f"manner {seed}").choice(MANNERS)
