"""Training when it is asked for: a program reads what it is asked for, a line of JSON each, and answers in
one.

Asked: ``loop`` (its name), ``steps``, ``warm_up`` (steps before), ``profile`` (whether to run one step under
torch's profiler instead). Answered: ``seconds`` of the steps, ``peak_bytes`` (of the GPU; on a CPU of the
process since its start), ``rows`` of the profile. The first line says what the program says of itself.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import TypedDict

import torch
from torch.profiler import ProfilerActivity

NUM_ROWS = 10


class Row(TypedDict):
    """An operator or kernel: what it took in one step, its share of the step, how often it ran."""

    name: str
    ms: float
    share: float
    count: int


def serve(loop_of: Callable[[str], Callable[[], object]], kind: str, **about: object) -> None:
    """Answer until nothing more is asked. ``loop_of``: the name of a loop -> runs one step of it."""
    # What libraries print goes where errors go: answers alone go out.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    print(json.dumps({"torch": torch.__version__, **about}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        step = loop_of(asked["loop"])
        answer = _profiled(step, kind) if asked["profile"] else _timed(step, kind, asked)
        if kind == "cuda":
            torch.cuda.empty_cache()  # others are next, on the same card
        print(json.dumps(answer), file=out, flush=True)


def _timed(step: Callable[[], object], kind: str, asked: dict[str, int]) -> dict[str, object]:
    for _ in range(asked["warm_up"]):
        step()
    if kind == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began_s = time.perf_counter()
    for _ in range(asked["steps"]):
        step()
    if kind == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began_s
    peak = (
        torch.cuda.max_memory_allocated()
        if kind == "cuda"
        else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )
    return {"seconds": seconds, "peak_bytes": peak}


def _profiled(step: Callable[[], object], kind: str) -> dict[str, object]:
    """The rows of one step that took longest by themselves."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if kind == "cuda" else [])]
    with torch.profiler.profile(activities=activities) as found:
        step()
        if kind == "cuda":
            torch.cuda.synchronize()
    took_us = "self_device_time_total" if kind == "cuda" else "self_cpu_time_total"
    events = [(getattr(event, took_us), event) for event in found.key_averages()]
    if kind == "cuda":  # kernels, and not the operators that launch them
        events = [(us, event) for us, event in events if event.device_type.name == "CUDA"]
    whole_us = sum(us for us, _ in events) or 1.0
    longest = sorted(events, key=lambda each: -each[0])[:NUM_ROWS]
    rows = [Row(name=e.key, ms=us / 1e3, share=us / whole_us, count=e.count) for us, e in longest]
    return {"rows": rows}
