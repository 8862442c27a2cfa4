"""Reports a slow device, or keeps its node out of plans: the job says which (``fault_tolerance.slow``).

Owns the choice. Which device is slow is ``pace``'s. A step is as long as its slowest pipeline's, so one
device that takes k times as long makes every step up to k times as long; without its node, of N, all others
have N / (N - 1) as much to do, which is less for every k >= 2.
"""

from __future__ import annotations

from oobleckd.core.context import Core
from oobleckd.core.entries import NodeDrained
from oobleckd.core.run import Run
from oobleckd.planner.plan import node_of
from oobleckd.protocol.changes import DevicePace, Level, SlowFate


def tell(core: Core, run: Run, news: dict[str, str]) -> None:
    """Say what is new of devices' paces (device -> words), and act on it."""
    for device, words in news.items():
        node, is_slow = node_of(device), device in run.paces.slow
        fate = _fate(core, run, node) if is_slow else ""
        what = f"; {_words(run, node, fate)}" if fate else ""
        level: Level = "warn" if is_slow else "info"
        said = DevicePace(node, device, is_slow, fate)
        core.announce(f"{device} {words}{what}", said, (f"node:{node}",), level=level)
    # Only where the job asks for it: on machines that are shared slowness passes, and a drain does not.
    # (D-corruption-008)
    if run.job.spec.fault_tolerance.slow == "drain":
        for device, factor in sorted(run.paces.slow.items()):
            if _may_go(core, run, node_of(device)):
                reason = f"{device} is slow: {factor:.1f} times its peers"
                core.record(NodeDrained(node_of(device), reason, undo=False, at=core.now, cause="slow"))


def _fate(core: Core, run: Run, node: str) -> SlowFate:
    if run.job.spec.fault_tolerance.slow == "report":
        return "reported"
    return "drained" if _may_go(core, run, node) else "needed"


def _words(run: Run, node: str, fate: SlowFate) -> str:
    if fate == "reported":
        return "it stays in the plan"
    if fate == "drained":
        return f"{node} is drained (`oobleckctl undrain {node}` lets it back)"
    return f"it stays in the plan: without {node} the job could not lose {run.job.spec.fault_tolerance.f}"


def _may_go(core: Core, run: Run, node: str) -> bool:
    """Whether the others keep what the job promises: f + 1 copies of every layer."""
    nodes = core.candidates(run.job)
    return node in nodes and len(nodes) > (run.job.spec.fault_tolerance.f + 1) * run.job.n0
