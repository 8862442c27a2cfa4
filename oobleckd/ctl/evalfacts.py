"""Evaluations of two runs of one job, compared bit by bit, by step and source.

Owns what a run says of them and what differs. All else of a run is ``compare``'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec


class EvalFact(msgspec.Struct, frozen=True):
    """What a run says of an evaluation after ``step`` steps: the loss on ``source`` (its 64 bits, as
    ``float.hex`` has them) and over how many ``targets`` that is the mean.
    """

    step: int
    source: str
    loss_hex: str
    targets: int


class ComparedEvals(msgspec.Struct, frozen=True):
    """``same`` of ``total`` evaluations of sources are equal in every bit; what of the others is not."""

    same: int
    total: int
    findings: tuple[str, ...]


def compare_evaluations(ours: Sequence[EvalFact], theirs: Sequence[EvalFact], steps: range) -> ComparedEvals:
    """Of a run and of the one without failures, after as many steps as are in ``steps``."""
    mine, other = (_by_place(facts, steps) for facts in (ours, theirs))
    findings, same = [], 0
    for step, source in sorted(mine.keys() | other.keys()):
        at = f"evaluation after step {step}, {source}"
        one, without = mine.get((step, source)), other.get((step, source))
        if one is None or without is None:
            findings.append(f"{at}: is missing {'here' if one is None else 'without failures'}")
        elif one != without:
            findings.append(f"{at}: {_words(one)} here, {_words(without)} without failures")
        else:
            same += 1
    return ComparedEvals(same, len(mine.keys() | other.keys()), tuple(findings))


def _by_place(facts: Sequence[EvalFact], steps: range) -> dict[tuple[int, str], EvalFact]:
    return {(fact.step, fact.source): fact for fact in facts if fact.step in steps}


def _words(fact: EvalFact) -> str:
    return f"loss {fact.loss_hex} of {fact.targets} targets"


class _Line(msgspec.Struct, frozen=True):
    """What a round found on a source, as the reference run of one process writes it."""

    step: int
    source: str
    loss_sum_hex: str
    targets: int


def read_evaluations(lines: Path) -> tuple[EvalFact, ...]:
    """Those of an ``evaluations.jsonl``; there is none of a run by an older version. Raises OSError, and
    ValueError of a line that is none.
    """
    if not lines.exists():
        return ()
    rounds: dict[tuple[int, str], list[_Line]] = {}
    for text in lines.read_bytes().splitlines():
        line = msgspec.json.decode(text, type=_Line)
        rounds.setdefault((line.step, line.source), []).append(line)
    return tuple(_whole(step, source, found) for (step, source), found in rounds.items())


def _whole(step: int, source: str, rounds: Sequence[_Line]) -> EvalFact:
    """As the daemon adds rounds up: exactly."""
    targets = sum(line.targets for line in rounds)
    loss = math.fsum(float.fromhex(line.loss_sum_hex) for line in rounds) / targets
    return EvalFact(step, source, loss.hex(), targets)
