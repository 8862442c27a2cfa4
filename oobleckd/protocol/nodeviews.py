"""Nodes and their devices as the HTTP API shows them (``api`` has what all answers share)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from oobleckd.protocol.parts import (
    KeptOutCause,
    NodeCause,
)
from oobleckd.words import layers

NodeState = Literal["joining", "standby", "active", "draining", "drained", "disconnected", "lost", "left"]


class LayerRange(msgspec.Struct, frozen=True):
    """Layers ``[start, stop)`` of ``device``."""

    device: str
    start: int
    stop: int


def ranges(held: Iterable[LayerRange]) -> str:
    """The layers of a node's devices for people; those that several of them share once."""
    return ", ".join(dict.fromkeys(layers(each.start, each.stop) for each in held))


def together(devices: Sequence[str]) -> tuple[str, ...]:
    """``devices`` in their order, neighbours of one node under one name: "node-1/0-3"."""
    runs: list[list[str]] = []
    for device in devices:
        node, _, index = device.rpartition("/")
        if runs and index.isdigit() and runs[-1][-1] == f"{node}/{int(index) - 1}":
            runs[-1].append(device)
        else:
            runs.append([device])
    return tuple(run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('/')[2]}" for run in runs)


def held_together(held: Sequence[LayerRange]) -> tuple[LayerRange, ...]:
    """``held`` of one node, each range of layers once: what several devices hold, they hold between them."""
    devices: dict[tuple[int, int], list[str]] = {}
    for each in held:
        devices.setdefault((each.start, each.stop), []).append(each.device)
    return tuple(LayerRange(", ".join(together(names)), *range_) for range_, names in devices.items())


class DeviceFigures(msgspec.Struct, frozen=True):
    """What a device and its card say of themselves, as of ``at``. 0, or -1 where 0 is a figure: not known.

    ``rss_bytes``: of its process. ``used_bytes`` of ``planned_bytes`` (the planner's) and of ``total_bytes``:
    memory that it computes in, of the card where it has one. The rest is a card's: ``utilisation`` (0 to 1),
    watts, degrees Celsius, clocks in MHz, why its clocks are held down, memory errors since the driver was
    loaded, and the XIDs that the driver told of, newest last.
    """

    device: str
    at: float
    rss_bytes: int = 0
    used_bytes: int = 0
    planned_bytes: int = 0
    total_bytes: int = 0
    card: str = ""
    utilisation: float = -1.0
    power_w: float = 0.0
    power_limit_w: float = 0.0
    temperature_c: int = 0
    clock_mhz: int = 0
    clock_max_mhz: int = 0
    throttled: tuple[str, ...] = ()
    ecc_corrected: int = -1
    ecc_uncorrected: int = -1
    xids: tuple[int, ...] = ()


class NodeView(msgspec.Struct, frozen=True):
    """A node and its devices. ``heartbeat_age_s`` (in JSON ``beat_age_s``) is the age of its last heartbeat.

    ``spare``: its warm spare, "" if it keeps none; ``spare_bytes`` of the host's memory are the spare's (0:
    not known yet). ``layers`` are those that its devices compute, ``redundant`` (in JSON ``shadows``) the
    redundant ones, which they hold for others. ``zone``: what it fails together with, where that is known.
    ``bits``: of each device what decides the bits of its results, in short; ``traits``: all that does, by
    name. ``kept_out``: why no plan of the active job uses it, where a program should know ("data-changed": it
    would read another text). ``lease_s``: how long its silence is forgiven at present; what its first
    heartbeats teach makes that shorter. ``figures``: of its devices, what they said last. ``reason`` says to
    people why it is in its state, ``cause`` to programs.
    """

    name: str
    state: NodeState
    incarnation: str
    host: str
    devices: tuple[str, ...]
    kinds: tuple[str, ...]
    pids: tuple[int, ...]
    heartbeat_age_s: float = msgspec.field(name="beat_age_s")
    layers: tuple[LayerRange, ...]
    reason: str = ""
    spare: Literal["", "starting", "ready"] = ""
    spare_pid: int = 0
    spare_bytes: int = 0
    redundant: tuple[LayerRange, ...] = msgspec.field(default=(), name="shadows")  # its first name
    zone: str = ""
    bits: tuple[str, ...] = ()
    traits: tuple[dict[str, str], ...] = ()
    kept_out: KeptOutCause = ""
    lease_s: float = 0.0
    cause: NodeCause = ""
    figures: tuple[DeviceFigures, ...] = ()


class NodeLogView(msgspec.Struct, frozen=True):
    """The newest ``lines`` of a node's log, oldest first, as its agent tells them. ``complete``: with what
    its devices print, and not those of the agent alone.
    """

    node: str
    lines: tuple[str, ...]
    complete: bool
