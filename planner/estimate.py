"""The time of a pipeline in 1F1B without running it: closer than fill plus periods, as quick to compute.

Owns one formula. ``template`` plans with ``fill + (m - 1) * period``, which is never too low, linear in
m, and exact where stages are equal; where they are not, it charges waits that a stage fills with work.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.work import StageWork


def one_f_one_b_s(works: Sequence[StageWork], num_micro_batches: int) -> float:
    """Seconds that ``num_micro_batches`` micro-batches take at least, and on most pipelines do.

    For every stage: the stages before it do one forward before its first op and one backward after its
    last; it does all its own work; and it waits for those behind it (``_waits_s``). The slowest counts.
    """
    if num_micro_batches == 0:
        return 0.0
    each_s = [w.forward_s + w.send_s + w.input_s + w.weight_s + w.return_s for w in works]
    return max(
        sum(each_s[:stage])
        + num_micro_batches * each_s[stage]
        + _waits_s(work, len(works) - stage, sum(each_s[stage + 1 :]), num_micro_batches)
        for stage, work in enumerate(works)
    )


def _waits_s(work: StageWork, in_flight: int, trip_s: float, num_micro_batches: int) -> float:
    """Least waits of a stage with ``in_flight`` micro-batches at once, when one takes ``trip_s`` behind it.

    Its first backward comes after the trip of the first micro-batch, its last after that of the last. In
    between it has the other forwards to do, and backwards. With all in flight at once the two waits are one.
    """
    ahead = min(in_flight, num_micro_batches) - 1
    forward_s, backward_s = work.forward_s + work.send_s, work.input_s + work.weight_s + work.return_s
    first_s, last_s = max(0.0, trip_s - ahead * forward_s), max(0.0, trip_s - ahead * backward_s)
    return first_s + last_s if num_micro_batches > in_flight else max(first_s, last_s)
