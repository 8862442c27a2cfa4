"""The learning rate of a step: a function of the step's number and the job alone.

Owns the schedules. A float64 number of the host without any state, so whoever joins, resumes or branches has
the same rate to the bit, and the command line can say what two jobs do to it without loading torch.
"""

from __future__ import annotations

import math

from oobleckd.protocol.job import Job


def lr_at(step: int, job: Job) -> float:
    """Learning rate of ``step`` (from 0): a rise from 0 over the warm-up's steps, then as
    ``optimizer.schedule`` says.

    The first step after the warm-up has the peak. The last step of the job has ``min_lr_ratio`` of it where
    the schedule ends there (cosine, linear, wsd with ``decay_steps``); further steps would have it, too.
    """
    peak, warmup = job.optimizer.lr, job.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * _share(step, warmup, job)


def _share(step: int, warmup: int, job: Job) -> float:
    """Of the peak, behind the warm-up."""
    least = job.optimizer.min_lr_ratio
    match job.optimizer.schedule:
        case "constant":
            return 1.0
        case "inverse-sqrt":
            # As Vaswani et al. (2017) and Megatron: the rise meets the root where it ends.
            return max(least, math.sqrt((warmup + 1) / (step + 1)))
        case "cosine":
            way = 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup, job.train.steps)))
        case "linear":
            way = 1.0 - _progress(step, warmup, job.train.steps)
        case "wsd":
            way = _decayed(step, job)
    return least + (1.0 - least) * way


def _progress(step: int, warmup: int, steps: int) -> float:
    """From 0 at the first step after the warm-up to 1 at the last step (Loshchilov and Hutter 2017)."""
    num_decaying = steps - 1 - warmup
    return min(1.0, (step - warmup) / num_decaying) if num_decaying > 0 else 0.0


def _decayed(step: int, job: Job) -> float:
    """Warm-up, stable, decay (Hu et al. 2024): 1 until ``decay_steps`` before the end, 0 at the last step."""
    decay_steps = job.optimizer.decay_steps
    num_decayed = step + 1 - (job.train.steps - decay_steps)
    if num_decayed <= 0 or not decay_steps:
        return 1.0
    progress = min(1.0, num_decayed / decay_steps)
    match job.optimizer.decay_type:
        case "linear":
            return 1.0 - progress
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "1-sqrt":
            return 1.0 - math.sqrt(progress)
