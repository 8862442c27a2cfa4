"""Layers that sleep: what a pass takes is what they say, with what they compute in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.sleeping import environment_asleep

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 0.05
_PROGRAM = """
import json, msgspec, sys, torch
from benchmarks.sleeping import job_of
from oobleckd.protocol.jobschedule import Schedule
from oobleckd.worker.device.measure import measure
from oobleckd.worker.models import load_spec

job = msgspec.structs.replace(job_of("oobleck"), schedule=Schedule(backward=sys.argv[1]))
layers = measure(load_spec(job), job, torch.device("cpu")).layers
print(json.dumps([[layer.forward_s, layer.backward_s, layer.weight_s] for layer in layers]))
"""


@pytest.mark.parametrize(
    ("backward", "least"), [("fused", (1, 2, 0)), ("decoupled", (1, 2, 1))], ids=["fused", "decoupled"]
)
def test_blocks_take_their_time_in_every_pass(
    tmp_path: Path, backward: str, least: tuple[int, int, int]
) -> None:
    """The measured times are medians of several passes; of a decoupled backward the whole, and of it W."""
    asleep = environment_asleep(tmp_path / "asleep.json", (0.0, SECONDS, 0.0))
    asleep["PYTHONPATH"] += f":{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, backward],
        env=os.environ | asleep,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    embedding, *blocks, head = json.loads(done.stdout)
    assert max(*embedding, *head) < SECONDS
    for block in blocks:
        assert all(took_s >= times * SECONDS for took_s, times in zip(block, least, strict=True))
