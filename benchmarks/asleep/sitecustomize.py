"""Layers that take a given time, whatever they compute in it, and sleep for the rest: devices that do not
disturb each other.

In force in every Python program that has this folder in PYTHONPATH. ``OOBLECK_BENCH_ASLEEP`` names a JSON
file: the seconds of a forward pass of embedding, block and head; a backward pass takes twice as long, or as
long for I and as long for W where it is decoupled. It is read once a layer: reading it in every pass would
take 0.3 ms, which is nobody's work.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_LAYER = "oobleckd.worker.models.layer"


class _Finder(MetaPathFinder):
    """Finds the module of the layers once, and has them sleep after it was executed."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _LAYER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _have_sleep(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _rest(began_s: float, seconds: float) -> None:
    """Sleep until ``seconds`` are over."""
    left_s = began_s + seconds - time.perf_counter()
    if left_s > 0.0:
        time.sleep(left_s)


def _have_sleep(layers: Any) -> None:
    import torch  # not in a program that has no layers

    layer_class, passed = layers.Layer, [0.0]  # seconds of the backward passes under way

    class Asleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, out: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            return out.view_as(out)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            passed[0] += ctx.seconds
            return gradients[0], None

    class Owed:
        """What W still has to do, with its sleep."""

        def __init__(self, owed: Any, seconds: float) -> None:
            self._owed, self._seconds = owed, seconds

        def __getattr__(self, name: str) -> Any:
            return getattr(self._owed, name)

        def complete(self, *args: Any) -> Any:
            began_s = time.perf_counter()
            found = self._owed.complete(*args)
            _rest(began_s, self._seconds)
            return found

    def paced(backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began_s, passed[0] = time.perf_counter(), 0.0
            found = backward(*args)
            _rest(began_s, passed[0])
            return found

        return run

    compute, compute_apart = layer_class.__call__, layer_class.forward_apart

    def seconds_of(layer: Any) -> float:
        module = layer.module  # made anew for every layer of every job; a layer itself takes no attribute
        if not hasattr(module, "asleep_s"):
            embedding_s, block_s, head_s = json.loads(Path(os.environ["OOBLECK_BENCH_ASLEEP"]).read_bytes())
            module.asleep_s = float(head_s if layer.is_head else block_s if layer.index else embedding_s)
        return float(module.asleep_s)

    def call(layer: Any, *given: Any) -> Any:
        began_s = time.perf_counter()
        out = compute(layer, *given)
        seconds = seconds_of(layer)
        _rest(began_s, seconds)
        apart = layer.deferral.on
        return Asleep.apply(out, seconds if apart else 2 * seconds)  # type: ignore[no-untyped-call]

    def call_apart(layer: Any, *given: Any) -> Any:
        out, owed = compute_apart(layer, *given)
        return out, Owed(owed, seconds_of(layer))

    layer_class.__call__, layer_class.forward_apart = call, call_apart
    layers.gradients, layers.input_gradients = paced(layers.gradients), paced(layers.input_gradients)


if "OOBLECK_BENCH_ASLEEP" in os.environ:
    sys.meta_path.insert(0, _Finder())
