"""The planner against brute force, one random case a seed: a sentence where they differ, else nothing."""

from __future__ import annotations

import math
import random

import msgspec

from benchmarks.brute import best_split_s, best_step_s, random_sizes_case, random_split_case, stages_time_s
from oobleckd.planner.plan import Template
from oobleckd.planner.policy import PlanError
from oobleckd.planner.sizing.instantiate import instantiate
from oobleckd.planner.templates.template import node_stages, templates_for

CLOSE = 1e-9  # of the time: both round


def split_mismatch(seed: int, gap: float = 0.0) -> str:
    """What is wrong with the template of case ``seed`` within ``gap``; "" for nothing."""
    case, counts = random_split_case(random.Random(seed))
    setup = msgspec.structs.replace(case.setup, gap=gap)
    best_s = best_split_s(case, counts)
    try:
        (made,) = templates_for(setup, [(case.num_nodes, case.share)])
    except PlanError as error:
        return f"seed {seed}: {error}, but {best_s} s can be had" if best_s < math.inf else ""
    if best_s == math.inf:
        return f"seed {seed}: nothing fits, but a template was made"
    stages = tuple((s.layers.start, s.layers.stop, s.num_devices) for s in made.stages)
    time_s = made.time_s(case.share)
    wrong = {
        "its time is not its stages'": abs(time_s - stages_time_s(setup.profile, stages, case.share)) > CLOSE,
        f"the best takes {best_s} s": not best_s * (1 - CLOSE) <= time_s <= best_s / (1 - gap) * (1 + CLOSE),
        "its gap is not proved": time_s * (1 - made.gap) > best_s * (1 + CLOSE) or made.gap > gap,
        "a stage straddles two nodes": not _whole(made),
        "a stage is too large": 0 < setup.device_memory_bytes < max(s.memory_bytes for s in made.stages),
    }
    return "".join(f"seed {seed}: {what}; {time_s} s, {made}" for what, is_so in wrong.items() if is_so)


def sizes_mismatch(seed: int) -> str:
    """What is wrong with the instantiation of case ``seed``; "" for nothing."""
    case = random_sizes_case(random.Random(seed))
    best_s, idle = best_step_s(case)
    found = instantiate(case.templates, case.num_nodes, case.f, case.num_micro_batches, case.reduce_s)
    by_size = {template.num_nodes: template for template in case.templates}
    members = [by_size[size] for size in found.sizes]
    slowest_s = max(t.time_s(share) for t, share in zip(members, found.shares, strict=True))
    reduce_s = case.reduce_s[len(members)] if case.reduce_s else 0.0
    wrong = {
        f"the best takes {best_s} s": abs(found.step_s - best_s) > CLOSE * best_s,
        "its time is not its pipelines'": abs(found.step_s - slowest_s - reduce_s) > CLOSE * best_s,
        f"{idle} nodes need to be idle": found.idle != idle,
        "nodes are lost": sum(found.sizes) + found.idle != case.num_nodes,
        "micro-batches are lost": sum(found.shares) != case.num_micro_batches,
        "there are too few pipelines": len(members) < min(case.f + 1, case.num_nodes // min(by_size)),
    }
    return "".join(f"seed {seed}: {what}; {found}" for what, is_so in wrong.items() if is_so)


def _whole(made: Template) -> bool:
    """Whether the stages of every node have no more devices than it."""
    devices = iter(stage.num_devices for stage in made.stages)
    return all(sum(next(devices) for _ in range(n)) <= made.devices_per_node for n in node_stages(made))
