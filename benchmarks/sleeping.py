"""Layers that sleep, and one policy after the other on clusters of such: what live benchmarks share.

Owns the environment in which layers sleep, the job of ``policies.py`` and ``simulated.py``, and which
policies a command line names. What is measured is theirs; how layers sleep is ``asleep``'s.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from benchmarks.peers.launch import isolate
from oobleckd.protocol.job import Job, PolicyName, parse_job

T = TypeVar("T")
ASLEEP_S = 0.025
"""Of a block in F, in I and in W."""
BLOCKS = 2
"""Of a stage, as in ``bubbles.py``."""
PIPELINES, STAGES, MICRO_BATCHES = 3, 2, 12
"""Of ``job_of``: six processes that are six devices."""
CHECKPOINT_EVERY = 10
"""Steps of it."""


def environment_asleep(times: Path, seconds: Sequence[float] = (0.0, ASLEEP_S, 0.0)) -> dict[str, str]:
    """The environment of programs in which a forward pass of embedding, block and head sleeps so many
    ``seconds``, as ``times`` says from now on.
    """
    times.write_text(json.dumps(seconds))
    return {"OOBLECK_BENCH_ASLEEP": str(times), "PYTHONPATH": str(Path(__file__).parent / "asleep")}


def job_of(policy: str, *, width: int = 256, checkpoint_every: int = CHECKPOINT_EVERY) -> Job:
    """Blocks that sleep."""
    config: dict[str, Any] = {
        "n_layer": BLOCKS * STAGES, "n_embd": width, "n_head": 4, "vocab_size": 256, "n_positions": 8,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return parse_job(
        {
            "name": f"policies-{policy}",
            "model": {"family": "gpt2", "config": config},
            "train": {"steps": 10_000, "global_batch": MICRO_BATCHES, "micro_batch": 1, "sequence": 8},
            "optimizer": {"clip_norm": 0.0},
            "fault_tolerance": {"f": 1, "policy": policy},
            "checkpoint": {"every": checkpoint_every},
            "resources": {"min_pipeline_nodes": STAGES},
        }
    )


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A command line that names policies (``policies_of``)."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="these policies, separated by commas")
    return parser


def policies_of(parser: argparse.ArgumentParser, only: str) -> list[str]:
    """Those that ``--only`` names, or all; a name that is none ends the program."""
    known = get_args(PolicyName)
    names = only.split(",") if only else list(known)
    if unknown := set(names) - set(known):
        parser.error(f"no policy is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return names


def under_each(names: Sequence[str], measure: Callable[[str, Path, dict[str, str]], T]) -> list[T]:
    """``measure(policy, folder, environment)`` one after the other, each with a folder of its own; what is
    found is shown at once.

    Raises ClusterFailed as ``measure`` does.
    """
    isolate()
    found: list[T] = []
    with tempfile.TemporaryDirectory(prefix="oobleck-bench-") as folder:
        environment = environment_asleep(Path(folder) / "asleep.json")
        for name in names:
            found.append(measure(name, Path(folder) / name, environment))
            print(found[-1], file=sys.stderr, flush=True)
    return found
