"""Data of three sources that changes its mix in the middle, for jobs on a real cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.helpers.prepared import prepared


def three_sources(folder: Path, changes_at: int) -> dict[str, Any]:
    """`[data]` of a job: a prepared folder, plain numbers and an array under ``folder``. The third gives
    samples from step ``changes_at`` on, until it was read once.
    """
    dice = np.random.default_rng(3)
    web = prepared(folder / ("1" * 32), [dice.integers(0, 80, 9000)], "uint16")
    dice.integers(80, 160, 5000).astype("<u4").tofile(folder / "code.bin")
    np.save(folder / "wiki.npy", dice.integers(160, 256, 3000))
    sources: list[dict[str, Any]] = [
        {"name": "web", "kind": "jsonl", "path": "/none", "prepared": str(web), "weight": 0.7},
        {"name": "code", "kind": "bin", "dtype": "uint32", "path": str(folder / "code.bin"), "weight": 0.3},
        {"name": "wiki", "kind": "npy", "path": str(folder / "wiki.npy"), "weight": 0},
    ]
    sources[-1] |= {"epochs": 1, "at_limit": "drop"}
    stage = {"from_step": changes_at, "weights": {"web": 0.25, "code": 0.25, "wiki": 0.5}}
    return {"source": sources, "tokenizer": "/none", "stage": [stage]}
