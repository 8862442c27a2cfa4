"""Tells the daemon when a device did what in a round, of some of the rounds.

Owns which rounds are told and the message. Pieces are noted where work is done (``passes``, ``executor``),
always, since nobody knows beforehand that a round will have to be repaired: an append for each. All devices
tell of the same rounds, or no round could be seen whole; so the daemon says which.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from oobleckd.planner.plan import BACKWARD, FORWARD
from oobleckd.protocol.messages import OpTimes
from oobleckd.protocol.parts import Counters, OpTime
from oobleckd.worker.round_machine.tasks import Task
from oobleckd.worker.runtime.timing import DeviceTimer, Moment
from oobleckd.worker.sharding.group import Waited, waited_s

MAX_OPS = 20_000
"""Beyond, a round is not told: half a megabyte, and more than anybody can look at."""
_encode = msgspec.msgpack.Encoder().encode


class Piece(NamedTuple):
    """Work of ``kind`` on ``task`` (None: of the whole round). ``waits``: when weights were waited for."""

    kind: str
    task: Task | None
    start: Moment
    stop: Moment
    early: bool = False
    waits: tuple[Waited, ...] = ()


@dataclass(frozen=True, slots=True)
class Round:
    """What names a committed round of a device."""

    device: str
    job: str
    epoch: int
    layout: int
    counters: Counters


def sampled(round_: int, every: int, *, repaired: bool) -> bool:
    """Whether ``round_`` is told: one of ``every`` (0: none), and each in which attempts made up
    for a loss.
    """
    # By the round's number and not by a clock: all devices know the number, so they tell of the same rounds
    # without a message. (D-watching-001)
    return every > 0 and (repaired or round_ % every == 0)


def told(of: Round, pieces: Iterable[Piece], timer: DeviceTimer, *, repaired: bool) -> OpTimes | None:
    """The message. ``timer``: what the marks of ``pieces`` are; None where there are too many of them."""
    at = time.time() - timer.settle()
    ops = tuple(_op(piece, timer) for piece in _joined(pieces))
    if len(ops) > MAX_OPS:
        return None
    return OpTimes(of.device, of.job, of.epoch, of.layout, of.counters, at, _encode(ops), repaired)


def op_times(
    of: Round, pieces: Iterable[Piece], every: int, timer: DeviceTimer, *, repaired: bool
) -> OpTimes | None:
    """``told`` if the round is one of those that are (``sampled``)."""
    return (
        told(of, pieces, timer, repaired=repaired)
        if sampled(of.counters.round, every, repaired=repaired)
        else None
    )


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """A forward pass ahead is noted layer by layer: layers that follow each other are one piece."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and last.kind == piece.kind == "S" and last.task == piece.task:
            last = last._replace(stop=piece.stop, waits=last.waits + piece.waits)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _op(piece: Piece, timer: DeviceTimer) -> OpTime:
    kind, task, start, stop, early, waits = piece
    gather_s = waited_s(waits, timer)
    start_s, stop_s = timer.seconds(start), timer.seconds(stop)
    if task is None:
        return OpTime(kind, -1, -1, -1, start_s, stop_s, early, gather_s=gather_s)
    done = FORWARD if kind in {"F", "S"} else BACKWARD
    again = kind != "S" and task.route.again(task.position) >= done
    return OpTime(
        kind,
        task.position,
        task.route.micro_batch,
        task.layers.start,
        start_s,
        stop_s,
        early,
        again,
        gather_s,
    )
