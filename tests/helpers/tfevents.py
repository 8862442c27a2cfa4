"""What TensorBoard's own reader has of a run."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import (
    SCALARS,
    TENSORS,
    EventAccumulator,
)


def accumulated(folder: Path) -> EventAccumulator:
    """All of a run, nothing left out."""
    found = EventAccumulator(str(folder), size_guidance={SCALARS: 0, TENSORS: 0})
    return found.Reload()


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """(step, value) of a tag, in the order of the file; values are 32-bit floats."""
    found = accumulated(folder)
    return [(each.step, each.value) for each in found.Scalars(tag)] if tag in found.scalars.Keys() else []


def texts(folder: Path, tag: str) -> list[str]:
    """The texts of a tag."""
    found = accumulated(folder)
    if tag not in found.tensors.Keys():
        return []
    return [each.tensor_proto.string_val[0].decode() for each in found.Tensors(tag)]
