"""Layers are compiled before a device says that it is ready, and not in the middle of a step.

Owns when that is, and where a node keeps what was compiled: in one folder for all its devices, so that each
kind of layer is compiled once on a node, and loaded by those who come later, spares among them. How a layer
is compiled is ``oobleckd.worker.models.compiled``'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch

from oobleckd.protocol.job import Job
from oobleckd.worker.device.sample import calls_of, sample_batch
from oobleckd.worker.device.traits import traits
from oobleckd.worker.models import Layer, ModelSpec, gradients, seed_layer
from oobleckd.worker.models.compiled import check_compiler, keep_in
from oobleckd.worker.runtime.deaths import is_out_of_memory
from oobleckd.worker.runtime.errors import UserError

_FOLDER, _DONE = "compiled", ".done"
_KEY_BYTES = 8
_SHOWS_IN_GRAPHS = frozenset({"oobleckd", "transformers"})
"""Traits of what is compiled, and not of who compiles: torch's cache tells one graph from another."""


def folder_of(run_dir: Path, device: torch.device, environ: Mapping[str, str] = os.environ) -> Path:
    """Where what is compiled for ``device`` is kept: below the node's state folder, or where it has none its
    run directory; a folder of its own for each torch, compiler, and kind of CPU or card.
    """
    state = environ.get("STATE_DIRECTORY")
    found = traits(device)
    key = _digest({name: value for name, value in found.items() if name not in _SHOWS_IN_GRAPHS})
    return (Path(state) if state else run_dir) / _FOLDER / key


class Compiling:
    """What this process has compiled, or loaded, of the job that it trains."""

    def __init__(self, run_dir: Path, device: torch.device) -> None:
        self._run_dir, self._device = run_dir, device
        self._done: set[int] = set()  # layers
        self._job: Job | None = None

    def missing(self, job: Job, layers: Sequence[int]) -> list[int]:
        """Those of ``layers`` that are yet to be compiled; none of a job that compiles nothing."""
        if not job.train.compile:
            return []
        if job != self._job:
            self._job, self._done = job, set()
        return [layer for layer in layers if layer not in self._done and layer > 0]

    def begin(self) -> None:
        """Make ready to compile. Raises UserError where nothing can be compiled here."""
        keep_in(folder_of(self._run_dir, self._device))
        check_compiler(self._device)

    def run(self, spec: ModelSpec, layers: Sequence[int], bind: Callable[[int], Layer]) -> None:
        """Compile ``layers``, or load what others of this node compiled; ``bind``: what makes one of them.
        Raises UserError naming the layer that cannot be compiled.

        Each computes one micro-batch, forward and backward: what comes of it is thrown away, and no parameter
        changes.
        """
        with _first(self._folder, _digest(spec.job.costs_depend_on)):
            self._compile(spec, layers, bind)
        # As after the imports: their objects are no garbage collector's business. (D-devices-007)
        gc.collect()
        gc.freeze()

    @property
    def _folder(self) -> Path:
        return folder_of(self._run_dir, self._device)

    def _compile(self, spec: ModelSpec, layers: Sequence[int], bind: Callable[[int], Layer]) -> None:
        batch = sample_batch(spec.job).to(self._device)
        calls = calls_of(spec, batch)
        train = spec.job.train
        shape = (train.micro_batch, train.sequence, spec.config.hidden_size)
        out, behind = None, -1
        for index in layers:
            # Of the block before, where there is one: what goes in may not be float32.
            x = (
                out.detach()
                if out is not None and index == behind
                else torch.zeros(shape, device=self._device)
            )
            x.requires_grad_()
            with _named(spec, index):
                layer = bind(index)
                seed_layer(train.seed, 0, 0, index, self._device)
                out = layer(x, batch, calls.get(index))
                gradients(out, [*layer.leaves, x], None if layer.is_head else torch.ones_like(out))
            behind = index + 1
            self._done.add(index)


@contextlib.contextmanager
def _first(folder: Path, what: str) -> Iterator[None]:
    """Within, nobody else of this node compiles ``what``, unless somebody has: then all load it at once."""
    done = folder / f"{what}{_DONE}"
    if done.exists():
        yield
        return
    # The kernel lets go of it however this process ends.
    with (folder / f"{what}.lock").open("w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        done.touch()


@contextlib.contextmanager
def _named(spec: ModelSpec, index: int) -> Iterator[None]:
    """Whatever torch's compiler says of layer ``index`` is a user's to mend; too little memory is not."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        what = "the head" if index == spec.num_layers - 1 else f"block {index - 1}"
        why = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise UserError(
            f"train.compile: {what} of {spec.architecture} cannot be compiled: {why}",
            "set train.compile = false, or say so with the message in the worker's log",
        ) from error


def _digest(what: object) -> str:
    identity = msgspec.json.encode(what, order="deterministic")
    return hashlib.blake2b(identity, digest_size=_KEY_BYTES).hexdigest()
