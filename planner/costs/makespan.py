"""Computes the time of one pipeline in 1F1B: run in a few hundred nanoseconds an op, or estimated stage by
stage.

Owns two numbers of the same order of ops. ``split`` searches with ``fill + (m - 1) * period``, which is
linear in m and exact where stages are equal; where they are not, it charges waits that a stage fills with
work. ``timeline`` runs any schedule and says what happens when, at some twenty times the price.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oobleckd.planner.costs.model import Floats
from oobleckd.planner.costs.work import StageWork

_STEADY = 4  # micro-batches a stage after which every further one takes as long as the slowest stage


def one_f_one_b_s(works: Sequence[StageWork], num_micro_batches: int) -> float:
    """Seconds that ``num_micro_batches`` micro-batches take, as the dry run of ``schedule.one_f_one_b`` has
    it.

    Beyond some times as many as stages, those that follow count a period of the slowest stage each.
    """
    run = min(num_micro_batches, _STEADY * len(works) + 1)
    more_s = (num_micro_batches - run) * max(map(busy_s, works), default=0.0)
    return (_run_s(works, run) if run else 0.0) + more_s


def busy_s(work: StageWork) -> float:
    """Seconds that one micro-batch keeps a stage busy."""
    return work.forward_s + work.send_s + work.input_s + work.weight_s + work.return_s


def _run_s(works: Sequence[StageWork], num: int) -> float:
    """Run it. Forwards of a micro-batch go down the stages, before them the backwards that 1F1B puts there:
    those need only what has run in earlier rounds.
    """
    stages = range(len(works))
    ahead = [min(len(works) - stage, num) for stage in stages]  # forwards before the first backward
    free_s = [0.0] * len(works)
    gradient_s = [[0.0] * num for _ in stages]  # when the gradient of a micro-batch is there
    backward_s = [work.input_s + work.weight_s for work in works]

    def backward(stage: int, micro_batch: int) -> None:
        done_s = max(free_s[stage], gradient_s[stage][micro_batch]) + backward_s[stage]
        free_s[stage] = done_s + works[stage].return_s
        if stage:
            gradient_s[stage - 1][micro_batch] = free_s[stage]

    for micro_batch in range(num):
        for stage in reversed(stages):
            if micro_batch >= ahead[stage]:
                backward(stage, micro_batch - ahead[stage])
        there_s = 0.0
        for stage in stages:
            work = works[stage]
            free_s[stage] = there_s = max(free_s[stage], there_s) + work.forward_s + work.send_s
    for micro_batch in range(num):
        for stage in reversed(stages):
            if micro_batch >= num - ahead[stage]:
                backward(stage, micro_batch)
    return max(free_s)


def stage_bounds_s(
    forward_s: Floats, backward_s: Floats, before_s: Floats, behind_s: Floats, in_flight: int, num: int
) -> Floats:
    """What a pipeline takes at least, for ``num`` micro-batches, going by one of its stages; element by
    element.

    That stage is busy ``forward_s`` and ``backward_s`` with one micro-batch, which takes ``before_s`` and
    ``behind_s`` in the stages around it; it has ``in_flight`` at once. It begins after one forward and ends
    before one backward of those before it, does all its own work, and waits for those behind: its first
    backward comes after the trip of the first micro-batch, its last after that of the last. In between it has
    the other forwards to do, and backwards. With all in flight at once the two waits are one.
    """
    ahead = min(in_flight, num) - 1
    first_s = np.maximum(0.0, behind_s - ahead * forward_s)
    last_s = np.maximum(0.0, behind_s - ahead * backward_s)
    waits_s: Floats = first_s + last_s if num > in_flight else np.maximum(first_s, last_s)
    return waits_s + before_s + num * (forward_s + backward_s)
