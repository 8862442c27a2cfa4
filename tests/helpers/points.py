"""Deaths inside the backup, the validation and the copy on a real cluster, from a seed.

The manner is the seed's. A backup and a validation are there where the update is staggered, a copy where the
plan changes: nodes come and go for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from oobleckd.planner.plan import node_of
from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job
from tests.helpers.manners import KEEPING_MANNERS, Manner
from tests.helpers.matrix import AHEAD, drain, survivable, undrain

POINTS = ("backup", "validate", "copy")


def manner_of_points(seed: int) -> Manner:
    """All manners in turn in which layers are copied."""
    return KEEPING_MANNERS[seed % len(KEEPING_MANNERS)]


def point_seed(cluster: Cluster, seed: int, manner: Manner | None = None) -> str:
    """A job in which devices die at one or two of the points. Returns what was done.

    One node of the cluster, the *guest*, is drained at first: the plan changes when it comes.
    """
    rng = random.Random(f"points {seed}")
    manner = manner or manner_of_points(seed)
    possible = [point for point in POINTS if point == "copy" or manner.update == "staggered"]
    points = rng.sample(possible, rng.choice([1, min(2, len(possible))]))
    cluster.heal()
    guest = max(node.name for node in cluster.client.nodes())
    drain(cluster, guest)
    train = {"steps": 120 if "copy" in points else 40, "global_batch": 6}
    job = cluster.client.submit(tiny_job(f"points-{seed}", train=train, **manner.tables())).id
    manner.check(cluster.at_step(job, 2))
    story = []
    for point in sorted(points, key=POINTS.index):
        act = _die_in_copy if point == "copy" else _die_in_update
        story.append(f"{point} {act(cluster, job, point, guest, rng)}")
    for node in cluster.client.nodes():
        if node.state in {"draining", "drained"}:
            cluster.client.undrain(node.name)
    done = cluster.job_in(job, "done")
    assert done.steps_lost == 0, f"{done.steps_lost} steps lost"
    cluster.verify(job)
    return f"{', '.join(story)}; {done.incidents} incidents"


def _die_in_update(cluster: Cluster, job: str, point: str, _guest: str, rng: random.Random) -> str:
    before = len(cluster.fired())
    view = cluster.client.job(job)
    victim = rng.choice(_victims(view))
    cluster.client.kill(victim, "device", at=point, round=view.step + AHEAD + rng.randrange(3))
    cluster.until(lambda: _fired(cluster, before, point, victim) or None, f"{victim} to die at {point}")
    _recovered(cluster, job, victim)
    return victim


def _die_in_copy(cluster: Cluster, job: str, point: str, guest: str, rng: random.Random) -> str:
    """Somebody dies who gets a copy: a node that was away for a moment, or the guest."""
    before = len(cluster.fired())
    cluster.client.control(job, "pause")  # who died before comes back, which takes longer than many steps
    cluster.job_in(job, "paused")
    cluster.usable(cluster.num_nodes - 1)
    cluster.client.control(job, "resume")
    view = cluster.until(lambda: _whole(cluster, job), f"all nodes but {guest} to have a place")
    members = _victims(view)
    victim = rng.choice([guest, rng.choice(members)])

    def over() -> bool:
        return _fired(cluster, before, point, victim)

    if victim != guest:
        drain(cluster, victim)
    cluster.client.kill(victim, "device", at=point, round=0)
    # Where a plan without room would not change, one that leaves makes room.
    leaving = [node for node in members if node != victim and survivable(view, {victim, node})]
    for node in leaving * 3:
        for move, who in ((_back, victim), (drain, node), (_back, node), (drain, victim)):
            if not over():
                move(cluster, who, over)
    assert over(), f"{victim} got no copy"
    return victim


def _back(cluster: Cluster, node: str, over: Callable[[], bool]) -> None:
    """``node`` may take part again; whether there is room for it is the plan's business."""
    undrain(cluster, node, over, ("active", "standby"))


def _victims(view: JobView) -> list[str]:
    """Nodes with a place whose layers others hold, too."""
    vacant = {node_of(device) for p in view.pipelines for device in p.vacant}
    nodes = sorted({node for p in view.pipelines for node in p.nodes} - vacant)
    return [node for node in nodes if survivable(view, {node})]


def _whole(cluster: Cluster, job: str) -> JobView | None:
    """The job, once every node but the guest has a place: who died before is back."""
    view = cluster.client.job(job)
    assert view.state not in {"done", "failed", "cancelled"}, f"{view.id} {view.state}: {view.reason}"
    return view if len({*view.nodes}) == cluster.num_nodes - 1 else None


def _fired(cluster: Cluster, before: int, point: str, node: str) -> bool:
    hits = cluster.fired()[before:]
    return any(hit["point"] == point and node_of(str(hit["device"])) == node for hit in hits)


def _recovered(cluster: Cluster, job: str, node: str) -> None:
    """The loss of ``node`` is behind the job: another one is another loss."""

    def closed() -> bool | None:
        incidents = [i for i in cluster.client.incidents() if i.job == job and node in i.nodes]
        return (bool(incidents) and not any(i.open for i in incidents)) or None

    cluster.until(closed, f"{job} to recover from the loss of {node}")
