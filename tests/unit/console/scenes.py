"""What a console may have to show: the same cluster at the moments of a day, from calm to a daemon that is
away.

Snapshots and pictures are made of them. What they have in common is ``scenery``'s; small facts for single
tests are ``build``'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from oobleckd.console.facts import AnyFact, Away, Fetched
from oobleckd.console.past import Walk
from oobleckd.protocol.changes import Change
from oobleckd.protocol.watch import Past, Snapshot
from tests.helpers.fleet import JOB, Fleet, thousand
from tests.unit.console import scenery
from tests.unit.console.scenery import (
    BEST_AT,
    DEAD,
    FLEET,
    NOW,
    SPARE,
    STEP,
    change,
    earlier,
    incident,
    loss_of,
    phases,
)


@dataclass(frozen=True, slots=True)
class Scene:
    """What was told, in order, what that is in a line, and the time."""

    says: str
    told: tuple[AnyFact, ...]
    now: float = NOW


def calm() -> Scene:
    """Nothing happens."""
    told = scenery.told(scenery.old_events(), (earlier(),), others=scenery.other_jobs(2))
    return Scene("all nodes are well, and another job waits", told)


def _lost() -> tuple[Change, ...]:
    of_incident, of_node = "incident:inc-42", f"node:{DEAD}"
    return (
        *scenery.old_events(),
        loss_of(DEAD, 9_102, 24.0, "signal 9"),
        change(9_103, 24.0, "incident", f"inc-42: {DEAD}: signal 9", of_incident, of_node, level="warn"),
        change(9_104, 23.9, "plan", f"{JOB}: {incident().reason}", f"job:{JOB}", of_incident),
    )


def failing() -> Scene:
    """A node died 0.9 s ago; peers compute for it, and its layers are being copied."""
    events = [
        *scenery.old_events(),
        *(msgspec.structs.replace(each, at=NOW - 0.894) for each in _lost()[-3:]),
    ]
    running = incident(
        open=True, at=NOW - 0.894, total_s=0.894, step=STEP + 1, committed_s=0.0, copied_bytes=0,
        phases=phases(("detect", 0.006), ("plan", 0.038), ("reconfigure", 0.26), ("copy", 0.59)),
    )  # fmt: skip
    plan = tuple(
        msgspec.structs.replace(line, vacant=(f"{DEAD}/0",)) if DEAD in line.nodes else line
        for line in FLEET.pipelines
    )
    told = scenery.told(
        events, (earlier(), running), job={"state": "recovering", "epoch": 4, "tolerance": 1}, pipelines=plan,
        states=scenery.lost([DEAD], "signal 9"),
        watched={"goodput": FLEET.goodput(0.81, BEST_AT),
                 "schedule": FLEET.schedule(STEP, NOW - 0.4, dead=(DEAD,))},
    )  # fmt: skip
    return Scene("a node died 0.9 s ago", told)


def recovered() -> Scene:
    """The same loss, 24 seconds later: a standby node has its place."""
    to = {DEAD: SPARE}
    plan = scenery.moved(FLEET.pipelines, to)
    names = ", ".join("+".join(line.nodes) for line in plan)
    events = (
        *_lost(),
        change(9_107, 22.9, "plan", f"{JOB}: generation 4, {names}", f"job:{JOB}"),
        change(9_110, 22.8, "incident", "inc-42: recovered in 1.224 s", "incident:inc-42", f"node:{DEAD}"),
    )
    told = scenery.told(
        events, (earlier(), incident()), job={"epoch": 4}, pipelines=plan,
        states=scenery.lost([DEAD], "signal 9"),
        gap=(22.8, 1.224),
        watched={
            "schedule": scenery.lanes_moved(FLEET.schedule(STEP, NOW - 0.4), to),
            "modelled": scenery.lanes_moved(FLEET.schedule(0, 0.0, measured=False), to),
        },
    )  # fmt: skip
    return Scene("a node died and another has its place; no step was lost", told)


def degraded() -> Scene:
    """Two more are lost and nobody waits any more: smaller pipelines, and one node that is silent."""
    small, gone = (
        Fleet((3, 3, 3)),
        {DEAD: "signal 9", "n001": "the link to it closed", "n010": "the lease ran out"},
    )
    to = dict(zip(small.names, (name for name in FLEET.names if name not in gone), strict=True))
    second = incident(
        id="inc-43", cause="n001: the link to it closed; n010: the lease ran out", nodes=("n001", "n010"),
        at=NOW - 300.0,
        epoch=5, reason="shrink: pipelines of 3, 3 and 3 nodes; can lose 1", cost_s=52.0, step=STEP - 470,
    )  # fmt: skip
    events = (
        *scenery.old_events(),
        loss_of("n001", 9_301, 300.0, gone["n001"]),
        loss_of("n010", 9_302, 299.9, gone["n010"]),
        change(9_310, 297.1, "incident", "inc-43: recovered in 1.224 s", "incident:inc-43"),
        change(9_340, 4.0, "node", "n003 is silent", "node:n003", level="warn"),
    )
    told = scenery.told(
        events, (earlier(), incident(at=NOW - 1_000.0), second), pipelines=scenery.moved(small.pipelines, to),
        job={"epoch": 5, "tolerance": 1, "samples_per_s": 37.8, "step_s": 0.45},
        states={name: ("lost", why) for name,
        why in gone.items()} | {"n003": ("disconnected", "no heartbeat for 4 s")},
        watched={
            "goodput": FLEET.goodput(0.74, BEST_AT, degraded=71.0),
            "schedule": scenery.lanes_moved(small.schedule(STEP, NOW - 0.4), to),
            "modelled": scenery.lanes_moved(small.schedule(0, 0.0, measured=False), to),
        },
    )  # fmt: skip
    return Scene("three nodes are gone and nobody waits: slower, and safe against one more loss", told)


def waiting() -> Scene:
    """Too few nodes are left; the state is in a checkpoint."""
    why = "the rack's power failed"
    gone = FLEET.names[2:]
    reason = f"{JOB}: no copy of layers 0-49 is left; back 80 steps to the checkpoint of step 12400"
    end = incident(
        id="inc-44",
        cause=why,
        nodes=gone,
        at=NOW - 95.0,
        steps_lost=80,
        copied_bytes=0,
        reason=reason,
        rejected=(),
    )
    events = (
        *scenery.old_events(),
        *(loss_of(name, 9_500 + number, 95.0, why) for number, name in enumerate(gone)),
        change(9_520, 94.0, "job", reason, f"job:{JOB}", level="warn"),
    )
    told = scenery.told(
        events, (earlier(), incident(at=NOW - 900.0), end), pipelines=(), states=scenery.lost(gone, why),
        job={
            "state": "waiting", "epoch": 6, "tolerance": -1, "samples_per_s": 0.0, "steps_lost": 80,
            "step": 12_400,
            "loss": FLEET.loss(12_400),
            "reason": "3 nodes are needed and 2 are here; step 12400 is in its checkpoint (start more nodes)",
        },
        watched={"schedule": None, "modelled": None, "schedules": None,
        "goodput": FLEET.goodput(0.0, BEST_AT, waiting=94.0)},
        stands_s=95.0,
    )  # fmt: skip
    return Scene("too few nodes: the job waits with its state in a checkpoint", told)


def stale() -> Scene:
    """The daemon is away; training goes on."""
    away = Away(NOW + 0.5, "no daemon listens on /run/oobleck/oobleckd.sock", "`systemctl start oobleckd`")
    return Scene("the daemon has been away for 12 s; training goes on", (*calm().told, away), NOW + 12.0)


def absent() -> Scene:
    """Nobody has answered yet."""
    away = Away(NOW, "no daemon: /run/oobleck/oobleckd.sock does not exist", "`systemctl start oobleckd`")
    return Scene("there is no daemon yet", (away,))


def past() -> Past:
    """Of half a minute before the loss and half a minute after it."""
    began, first = NOW - 54.0, STEP - 110
    fetched = next(fact for fact in calm().told if isinstance(fact, Fetched))
    assert fetched.status is not None
    assert fetched.nodes is not None
    assert fetched.templates is not None
    snapshot = Snapshot(
        began, 9_000, fetched.status, (FLEET.job(step=first, loss=FLEET.loss(first)),), fetched.nodes,
        FLEET.pipelines,
        fetched.templates, (earlier(),), FLEET.layers(),
    )  # fmt: skip
    count = int(29.5 / FLEET.span_s)
    steps = [
        change(9_001 + number, 24.2 + (count - 1 - number) * FLEET.span_s, "step",
        f"{JOB}: step {first + 1 + number} applied",
               job=JOB, step=first + 1 + number, loss=FLEET.loss(first + 1 + number), outcome="applied",
               epoch=3)
        for number in range(count)
    ]  # fmt: skip
    of_incident, of_node = "incident:inc-42", f"node:{DEAD}"
    closed = incident(at=NOW - 23.9)
    happened = [
        loss_of(DEAD, 9_102, 23.95, "signal 9"),
        change(9_103, 23.9, "incident", f"inc-42: {DEAD}: signal 9", of_incident, of_node, level="warn",
               incident="inc-42", nodes=[DEAD], epoch=4),
        change(9_104, 23.85, "plan", f"{JOB}: {closed.reason}", f"job:{JOB}", of_incident),
        change(9_110, 22.676, "incident", "inc-42: recovered in 1.224 s", of_incident, incident="inc-42",
        view=closed),
    ]  # fmt: skip
    schedules = (
        FLEET.schedule(first + 4, began + 2.0),
        FLEET.schedule(first + count + 1, NOW - 23.95, dead=(DEAD,)),
    )
    changes = tuple(sorted((*steps, *happened), key=lambda each: each.seq))
    return Past(
        NOW - 7_800.0,
        NOW,
        snapshot,
        changes,
        schedules,
        FLEET.steps(first, began - 0.1),
        scenery.old_events(),
    )


def replay() -> Scene:
    """Half a second after the loss, from the daemon's history."""
    return Scene(
        "half a second after the loss, from history", (Walk(past(), 0.0).begin(NOW - 23.4, playing=False),)
    )


def fleet() -> Scene:
    """A thousand nodes while a rack is lost."""
    cluster, why = thousand(), "the rack's switch failed"
    rack = tuple(node.name for node in cluster.nodes() if node.zone == "r26")
    silent = {cluster.names[number]: ("disconnected", "no heartbeat for 4 s") for number in (77, 410, 866)}
    reason = f"stay re-routed: peers of the same stages compute for {len(rack)} nodes; can lose 2"
    running = incident(
        cause="rack r26: its switch failed", nodes=rack, open=True, at=NOW - 1.948, total_s=1.948,
        committed_s=0.0, reason=reason,
        phases=phases(("detect", 0.91), ("plan", 0.038), ("reconfigure", 0.26), ("copy", 0.74)),
    )  # fmt: skip
    events = (
        *scenery.old_events(),
        *(loss_of(name, 9_600 + number, 1.9 - number / 100, why) for number, name in enumerate(rack)),
        change(9_620, 1.8, "incident", f"inc-42: {running.cause}", "incident:inc-42", level="warn"),
        change(9_621, 1.0, "plan", f"{JOB}: {reason}", f"job:{JOB}"),
    )
    told = scenery.told(
        events, (earlier(), running), fleet=cluster, states={**scenery.lost(rack, why), **silent},  # type: ignore[dict-item]
        job={"state": "recovering", "tolerance": 2, "epoch": 8},
        watched={"goodput": cluster.goodput(0.964, BEST_AT),
                 "schedule": cluster.schedule(STEP, NOW - 0.4, dead=rack)},
    )  # fmt: skip
    return Scene("a thousand nodes while a rack is lost", told)


SCENES: dict[str, Callable[[], Scene]] = {
    "calm": calm, "failing": failing, "recovered": recovered, "degraded": degraded, "waiting": waiting,
    "stale": stale,
    "absent": absent, "replay": replay, "fleet": fleet,
}  # fmt: skip
