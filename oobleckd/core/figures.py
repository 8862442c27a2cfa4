"""Figures of jobs that change with a step at most, kept for all who ask (``progress``). Not durable, and
nothing is decided by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from oobleckd.core.state import Step
from oobleckd.protocol.jobviews import StepTimes


class KnownTimes(NamedTuple):
    """``times`` as they were when ``newest`` was the newest step and ``slowest`` the slowest device."""

    newest: Step
    slowest: tuple[str, float]
    times: StepTimes


class KnownModel(NamedTuple):
    """FLOPs of a token, and parameters, of which some are ``active``; 0: nobody said."""

    flops_per_token: float = 0.0
    params: int = 0
    active: int = 0


@dataclass(slots=True)
class Figures:
    """By job: its ``models``, where they are known, and ``times`` of steps."""

    models: dict[str, KnownModel] = field(default_factory=dict)
    times: dict[str, KnownTimes] = field(default_factory=dict)
