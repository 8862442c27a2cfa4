"""Runs on disk, as a job leaves them: for tests of the comparison. Real safetensors files, a real
manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import save_file

from oobleckd.ctl.compare import StepFact

NAMES = ("wte.weight", "h.0.weight", "h.0.bias", "ln_f.weight")


def fact(step: int, loss: float, samples: int = 4, ledger: str = "") -> StepFact:
    """A step with a ledger that is right for it."""
    return StepFact(step, loss, loss.hex(), samples, ledger or f"samples-of-{step}")


def facts(num_steps: int = 3) -> tuple[StepFact, ...]:
    """The steps of a run."""
    return tuple(fact(step, 5.0 / step) for step in range(1, num_steps + 1))


def write_checkpoint(
    directory: Path,
    *,
    step: int = 3,
    drop: Sequence[str] = (),
    extra: Mapping[str, Any] | None = None,
    exponents: str = "[45]",
) -> Path:
    """A checkpoint with one bucket for each of ``NAMES`` but those in ``drop``."""
    directory.mkdir(parents=True)
    for index, name in enumerate(NAMES):
        values = np.random.default_rng(index).standard_normal((7, 5)).astype(np.float32)
        tensors = {f"{kind}/{name}": values * scale for kind, scale in [("param", 1), ("exp_avg", 2)]}
        if name not in drop:
            save_file(tensors, directory / f"bucket-{index:05d}.safetensors", {"exponents": exponents})
    seal(directory, step=step, extra=extra)
    return directory


def seal(directory: Path, *, step: int = 3, extra: Mapping[str, Any] | None = None) -> None:
    """Write the manifest that fits what lies in the folder now, as a clever forger would."""
    buckets = [
        {
            "file": file.name,
            "num_bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in sorted(directory.glob("*.safetensors"))
    ]
    manifest = {
        "counters": {"round": step, "step": step, "applied": step},
        "buckets": buckets,
        "corpus": "3-0a",
        **(extra or {}),
    }
    (directory / "manifest.json").write_bytes(msgspec.json.encode(manifest))


def flip_bit(file: Path, byte: int = -1, bit: int = 0) -> None:
    """Flip one bit of a file's last tensor."""
    data = bytearray(file.read_bytes())
    data[byte] ^= 1 << bit
    file.write_bytes(data)
