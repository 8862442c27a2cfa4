"""Evaluations of a job as the HTTP API shows them (``api`` has what all answers share)."""

from __future__ import annotations

import msgspec

from oobleckd.protocol.generation import Numbered


class SourceLoss(msgspec.Struct, frozen=True):
    """What an evaluation found on ``source``: the mean loss over ``targets`` tokens, null where that is no
    finite number, its bits for people (``loss_hex``), and the ``perplexity``, exp of it, null where that has
    no room.
    """

    source: str
    loss: float | None
    loss_hex: str
    perplexity: float | None
    targets: int


class EvaluationView(Numbered, frozen=True):
    """An evaluation after ``step`` steps (0: before the first): ``losses`` by source, and their mean over all
    targets in ``loss`` (null where it is no finite number). It took ``seconds``, up to ``at``.
    """

    step: int
    loss: float | None
    losses: tuple[SourceLoss, ...]
    epoch: int
    at: float
    seconds: float


class BestLoss(msgspec.Struct, frozen=True):
    """The least loss of an evaluation ``source``, first met after ``step`` steps."""

    source: str
    step: int
    loss: float


class EvalSummary(msgspec.Struct, frozen=True):
    """How evaluating goes. ``last``: the newest evaluation; ``best``: the least loss of each source.
    ``next_step``: after how many steps the next one is, or the one under way (-1: none is to come), of which
    ``rounds_done`` of ``rounds`` are over. ``planned_s``: of one, and ``planned_share`` of all in the time of
    a job without failures (0: no plan is in force). ``measured_share``: of the time of the job's devices so
    far.
    """

    last: EvaluationView | None = None
    best: tuple[BestLoss, ...] = ()
    next_step: int = -1
    rounds_done: int = 0
    rounds: int = 0
    planned_s: float = 0.0
    planned_share: float = 0.0
    measured_share: float = 0.0
