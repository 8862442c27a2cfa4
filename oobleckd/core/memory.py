"""Computes how much memory a plan may count on: not what devices share, nor what the nodes' spares take.

Owns the arithmetic; the numbers come from the agents. A GPU is its device's alone, and a spare holds none of
it. A CPU device has its share of the host's memory, whichever nodes of that host the devices belong to.
"""

from __future__ import annotations

from collections.abc import Collection
from math import ceil

from oobleckd.core.membership import Node
from oobleckd.core.state import JobRecord
from oobleckd.planner.placement.lanes import Lanes
from oobleckd.planner.plan import Plan, Range
from oobleckd.planner.policy import WITH_REDUNDANT_LAYERS
from oobleckd.planner.profile import FLOAT_BYTES, HeldBesides, Profile, state_bytes_per_param, sum_bytes
from oobleckd.protocol.job import Job
from oobleckd.protocol.parts import DeviceInfo

SPARE_BYTES = 400 * 2**20  # a spare that is still starting: Python, torch and transformers


def min_device_bytes(nodes: Collection[Node], members: Collection[Node], cap_bytes: int) -> int:
    """The memory that every device of ``nodes`` has for training, in bytes; 0: nobody knows of a limit.

    ``members``: all nodes that live, which may share a host with ``nodes``. ``cap_bytes`` (0: none).
    """
    found = [_host_share(node, members) for node in nodes if _on_host(node)]
    found += [info.memory_bytes for node in nodes for info in node.devices if info.kind != "cpu"]
    return min([*(each for each in found if each), *([cap_bytes] if cap_bytes else [])], default=0)


def _host_share(node: Node, members: Collection[Node]) -> int:
    """What a CPU device of ``node`` may use; 0 when its agent does not know the host's memory."""
    whole = min(info.memory_bytes for info in _on_host(node))
    neighbours = [other for other in members if other.host == node.host]
    spares = sum(other.spare.memory_bytes or SPARE_BYTES for other in neighbours if other.spare is not None)
    num_devices = sum(len(_on_host(other)) for other in neighbours)
    return max(1, (whole - spares) // num_devices) if whole else 0


def _on_host(node: Node) -> list[DeviceInfo]:
    return [info for info in node.devices if info.kind == "cpu"]


def planned_by_device(job: JobRecord, plan: Plan) -> dict[str, int]:
    """Device -> the bytes that the planner counted on for it, of all that have a place in ``plan``."""
    templates = {template.num_nodes: template for template in reversed(job.templates)}
    found: dict[str, int] = {}
    for pipeline in plan.pipelines:
        template = templates.get(len(pipeline.nodes))
        by_layers: dict[Range, int] = {}
        for stage in template.stages if template is not None else ():
            by_layers[stage.layers] = max(stage.memory_bytes, by_layers.get(stage.layers, 0))
        for segment in pipeline.segments:
            num_bytes = by_layers.get(segment.layers, 0)
            found[segment.device] = max(num_bytes, found.get(segment.device, 0))
    return Lanes.of(job.setup).of_devices(found) if job.setup is not None else found


def held_besides(job: Job, profile: Profile) -> HeldBesides:
    """What a device of ``job`` holds besides its stage: all that it sent in a step, where its memory is the
    host's; and with a staggered update weights and what the optimizer keeps of them as they were, and once
    more while a checkpoint of them is written, where its memory is the host's; forward passes that it runs
    ahead, where it is redundant; and where sums are copied to peers, those that are on their way out, on
    their way in, and kept.
    """
    on_host = profile.device.startswith("cpu")
    turns = ceil(job.num_micro_batches / profile.devices_per_stage)
    sent_bytes = profile.kept_bytes(turns, job.schedule.boundary_bytes) if on_host else 0
    exact = job.train.exact
    copied, whole = _bytes_per_param(profile, exact=exact)
    sums = 3 * sum_bytes(exact) / whole * (on_host and job.schedule.sum_copies > 0)
    copies = (job.schedule.update == "staggered") + (on_host and job.checkpoint.every != 0)
    ahead_bytes = job.schedule.redundant_bytes if job.fault_tolerance.policy in WITH_REDUNDANT_LAYERS else 0
    return HeldBesides(copied / whole * copies + sums, sent_bytes, ahead_bytes)


def _bytes_per_param(profile: Profile, *, exact: bool) -> tuple[float, float]:
    """Of a parameter of the model on average: what is copied of its state, and all that lives with it."""
    if any(layer.slot_bytes < 0 for layer in profile.layers):
        # Measured when totals were kept, too, for a donor to give. (D-exactness-019)
        return 12, state_bytes_per_param(exact) + sum_bytes(exact)
    num_params = sum(layer.param_bytes for layer in profile.layers) / FLOAT_BYTES
    return profile.copied_bytes / num_params, sum(layer.state_bytes for layer in profile.layers) / num_params
