"""What micro-batches take that pass through a plan forward alone, as those of an evaluation do.

Owns that estimate; the costs of ops are ``work``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from oobleckd.planner.costs.work import StageWork, stage_works
from oobleckd.planner.plan import Plan, Range, Segment
from oobleckd.planner.profile import Profile


def forward_s(plan: Plan, profile: Profile, num: int) -> float:
    """Seconds that the micro-batches 0 to ``num`` - 1 of ``plan`` take, all pipelines at once."""
    num = ceil(num / profile.devices_per_stage)
    made: dict[tuple[tuple[Range, ...], int], tuple[StageWork, ...]] = {}
    longest_s = 0.0
    for pipeline in plan.pipelines:
        key = tuple(segment.layers for segment in pipeline.segments), pipeline.chunks
        if key not in made:
            made[key] = stage_works(key[0], profile, chunks=key[1])
        here = sum(micro_batch < num for micro_batch in pipeline.micro_batches)
        if here:
            longest_s = max(longest_s, _pass_s(pipeline.segments, made[key], here))
    return longest_s


def _pass_s(segments: Sequence[Segment], works: Sequence[StageWork], num: int) -> float:
    """Of one pipeline: its busiest device, what comes before its first micro-batch, and behind its last."""
    takes_s = [work.forward_s + work.send_s for work in works]
    places: dict[str, list[int]] = {}
    for place, segment in enumerate(segments):
        places.setdefault(segment.device, []).append(place)
    return max(
        sum(takes_s[: at[0]]) + num * sum(takes_s[place] for place in at) + sum(takes_s[at[-1] + 1 :])
        for at in places.values()
    )
