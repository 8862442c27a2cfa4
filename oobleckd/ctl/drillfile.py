"""A drill as a file: which faults, when, to whom; and the script that a seed makes of it.

Owns the model and the draw. Pure but for reading the file: carrying a script out is ``drill``'s.

Errors: DrillError (a ValueError) with ``hint``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from oobleckd.host import anyfile
from oobleckd.protocol.parts import AT_A_POINT, How, Point
from oobleckd.protocol.units import parse_seconds
from oobleckd.protocol.unreadable import problem_of
from oobleckd.words import count, seconds

_COME_BACK = frozenset({"device", "hang", "slow"})  # nothing is lost, or the agent starts it by itself
Wait = Literal["no", "recovered", "whole"]
Number = TypeVar("Number", int, float)


SEE = "docs/drills.md explains them"


class DrillError(ValueError):
    """A drill that cannot be played; a hint where there is one."""

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One fault. Pairs are drawn from, both ends included.

    ``who``: a node's name, ``random`` or ``random:K``. ``step``: steps that the job has committed before.
    ``after_s``: seconds after that. ``phase``: not then, but when a device reaches this fault point.
    ``for_s``: sigstop, net-drop and slow end after so long. ``start``: once the job has recovered, start the
    nodes again. ``wait``: go on at once ("no"), when the job has recovered, or when it is whole again: the
    nodes are back in its plan, so that it can bear as much as before.
    """

    who: str = "random"
    how: How = "sigkill"
    step: Annotated[int, Meta(ge=0)] | Annotated[list[int], Meta(min_length=2, max_length=2)] = 1
    after_s: Annotated[float, Meta(ge=0)] | Annotated[list[float], Meta(min_length=2, max_length=2)] = 0.0
    phase: str = ""
    for_s: Annotated[float, Meta(ge=0)] = 0.0
    wait: Wait = "recovered"
    start: bool = False


class Drill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A drill. ``job``: the id of a job that runs, or the job.toml to submit, relative to the
    drill's file.
    """

    job: str = ""
    verify: Literal["single", "cluster"] = "cluster"
    fault: tuple[Fault, ...] = ()


class Act(msgspec.Struct, frozen=True):
    """One fault of a script: everything drawn."""

    step: int
    after_s: float
    nodes: tuple[str, ...]
    how: How
    phase: str
    for_s: float
    wait: Wait
    start: bool

    def __str__(self) -> str:
        when = f"step {self.step}" + (f" + {seconds(self.after_s)}" if self.after_s else "")
        where = f" at {self.phase}" if self.phase else ""
        how_long = f" for {seconds(self.for_s)}" if self.for_s else ""
        then = {"no": "", "recovered": ", recovered", "whole": ", whole again"}[self.wait]
        then = ", started again" * self.start + then
        return f"{when}: {self.how}{where}{how_long} {', '.join(self.nodes)}{then}"


def load_drill(path: Path) -> Drill:
    """The drill of a file. Raises DrillError."""
    try:
        raw = _in_seconds(anyfile.toml(path, SEE))
        drill = msgspec.convert(raw, Drill)
    except FileNotFoundError as error:
        raise DrillError(
            f"{path}: cannot be read: {error.strerror}", "name a drill.toml: docs/drills.md has one"
        ) from error
    except anyfile.FileError as error:
        raise DrillError(f"{path}: {error}", error.hint) from error
    except msgspec.ValidationError as error:
        keys = ", ".join(Fault.__struct_fields__)
        told = problem_of(error, Drill, raw)
        raise DrillError(f"{path}: {told}", f"keys of [[fault]]: {keys}; {SEE}") from error
    if not drill.fault:
        raise DrillError(f"{path}: no fault", "add [[fault]] with step, who and how")
    for number, fault in enumerate(drill.fault, 1):
        if fault.phase:
            _check_phase(f"{path}: fault {number}", fault)
    return drill


def _in_seconds(raw: dict[str, Any]) -> dict[str, Any]:
    """Times may have units: "5m". What is none is refused as what it is."""
    for fault in raw["fault"] if isinstance(raw.get("fault"), list) else ():
        for key in ("after_s", "for_s"):
            if isinstance(fault, dict) and isinstance(fault.get(key), str):
                with suppress(ValueError):
                    fault[key] = parse_seconds(fault[key])
    return raw


def _check_phase(where: str, fault: Fault) -> None:
    if fault.phase not in get_args(Point):
        raise DrillError(f"{where}: no fault point {fault.phase!r}", f"phases: {', '.join(get_args(Point))}")
    if fault.how not in AT_A_POINT:
        hows = " or ".join(f'how = "{how}"' for how in AT_A_POINT)
        raise DrillError(f"{where}: {fault.how} waits for no fault point", f"phase goes with {hows}")


def script_of(drill: Drill, seed: int, nodes: Sequence[str]) -> tuple[Act, ...]:
    """The script that ``seed`` makes of ``drill`` on ``nodes``: the same for the same three. Raises
    DrillError.
    """
    dice = random.Random(f"drill {seed}")  # noqa: S311 - it must repeat, and guards nothing
    here = sorted(nodes)
    acts = []
    for number, fault in enumerate(drill.fault, 1):
        victims = _victims(number, fault, here, dice)
        step, after_s = _draw(fault.step, dice.randint), _draw(fault.after_s, dice.uniform)
        acts.append(Act(step, after_s, victims, fault.how, fault.phase, fault.for_s, fault.wait, fault.start))
        if not (fault.start or fault.for_s or fault.how in _COME_BACK):
            here = [node for node in here if node not in victims]
    return tuple(acts)


def _victims(number: int, fault: Fault, here: Sequence[str], dice: random.Random) -> tuple[str, ...]:
    word, _, number_of = fault.who.partition(":")
    known = f"nodes that are left: {', '.join(here) or 'none'}"
    if word != "random":
        if fault.who not in here:
            raise DrillError(f"fault {number}: no node {fault.who!r} is there then", known)
        return (fault.who,)
    if number_of and not number_of.isdigit():
        raise DrillError(f"fault {number}: who = {fault.who!r}", "write a node's name, random, or random:2")
    wanted = int(number_of or 1)
    if not 1 <= wanted <= len(here):
        raise DrillError(f"fault {number}: {wanted} of {count(len(here), 'node')} cannot be drawn", known)
    return tuple(sorted(dice.sample(list(here), wanted)))


def _draw(value: Number | list[Number], between: Callable[[Number, Number], Number]) -> Number:
    return between(*sorted(value)) if isinstance(value, list) else value
