"""Layers are compiled before a device says that it is ready, and not in the middle of a step.

Owns when that is, and where what was compiled is kept: in one folder for all devices of a node, or of all
nodes that share it, so that each kind of layer is compiled once, and loaded by those who come later, spares
among them. How a layer
is compiled is ``oobleckd.worker.models.compiled``'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from oobleckd.protocol.job import Job
from oobleckd.worker.device.sample import calls_of, sample_batch
from oobleckd.worker.device.traits import traits
from oobleckd.worker.models import Batch, Call, Layer, ModelSpec, gradients, seed_layer
from oobleckd.worker.models.compiled import check_compiler, keep_in
from oobleckd.worker.runtime.deaths import is_out_of_memory
from oobleckd.worker.runtime.errors import UserError

_DONE = ".done"
_KEY_BYTES = 8
_SHOWS_IN_GRAPHS = frozenset({"oobleckd", "transformers"})
"""Traits of what is compiled, and not of who compiles: torch's cache tells one graph from another."""


def folder_of(root: Path, device: torch.device) -> Path:
    """Where in ``root`` what is compiled for ``device`` is: by torch, compiler, and kind of CPU or card."""
    found = traits(device)
    return root / _digest({name: value for name, value in found.items() if name not in _SHOWS_IN_GRAPHS})


class Compiling:
    """What this process has compiled, or loaded, of the job that it trains; kept in ``root``, which others
    may share.
    """

    def __init__(self, root: Path, device: torch.device) -> None:
        self._root, self._device = root, device
        self._done: set[int] = set()  # layers
        self._job: Job | None = None

    def missing(self, job: Job, layers: Sequence[int]) -> list[int]:
        """Those of ``layers`` that are yet to be compiled."""
        if job != self._job:
            self._job, self._done = job, set()
        return [layer for layer in layers if layer not in self._done and layer > 0]

    def begin(self) -> None:
        """Make ready to compile. Raises UserError where nothing can be compiled here."""
        keep_in(folder_of(self._root, self._device))
        check_compiler(self._device)

    def run(self, spec: ModelSpec, layers: Sequence[int], bind: Callable[[int], Layer]) -> None:
        """Compile ``layers``, or load what others of this node compiled; ``bind``: what makes one of them.
        Raises UserError naming the layer that cannot be compiled.

        Each computes one micro-batch, forward and backward: what comes of it is thrown away, and no parameter
        changes.
        """
        batch = sample_batch(spec).to(self._device)
        calls, x = calls_of(spec, batch), _embedded(spec, batch, self._device)
        folder = folder_of(self._root, self._device)
        for kind in sorted({_kind(spec, layer) for layer in layers}):
            with _first(folder, _digest([*spec.job.costs_depend_on, kind])):
                for index in layers:
                    if _kind(spec, index) == kind:
                        with _named(spec, index, folder):
                            self._try(bind(index), x, batch, calls.get(index))
        # As after the imports: their objects are no garbage collector's business. (D-devices-007)
        gc.collect()
        gc.freeze()

    def _try(self, layer: Layer, x: Tensor, batch: Batch, call: Call | None) -> None:
        assert self._job is not None
        seed_layer(self._job.train.seed, 0, 0, layer.index, self._device)
        out = layer(x, batch, call)
        gradients(out, [*layer.leaves, x], None if layer.is_head else torch.ones_like(out))
        self._done.add(layer.index)


def _kind(spec: ModelSpec, index: int) -> str:
    return "head" if index == spec.num_layers - 1 else spec.kind_of(index)


def _embedded(spec: ModelSpec, batch: Batch, device: torch.device) -> Tensor:
    """What goes into a block: as the embedding makes it, of weights that take no memory."""
    zero = torch.zeros((), device=device)
    buckets = [spec.buckets[bucket] for bucket in spec.buckets_of(0)]
    params = {
        key: zero.expand(shape)
        for bucket in buckets
        for key, shape in zip(bucket.keys, bucket.shapes, strict=True)
    }
    with torch.no_grad():
        return spec.layer(0, params, device)(None, batch).requires_grad_()


@contextlib.contextmanager
def _first(folder: Path, what: str) -> Iterator[None]:
    """Within, nobody else compiles ``what`` in ``folder``, unless somebody has: then all load it at once."""
    done = folder / f"{what}{_DONE}"
    if done.exists():
        yield
        return
    with contextlib.ExitStack() as held:
        # The kernel lets go of it however this process ends. Where there are no locks, or there is no room,
        # others compile the same at the same time, to the same files.
        with contextlib.suppress(OSError):
            lock = held.enter_context((folder / f"{what}.lock").open("w", encoding="ascii"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if done.exists():
                fcntl.flock(lock, fcntl.LOCK_UN)
        yield
        with contextlib.suppress(OSError):
            done.touch()


@contextlib.contextmanager
def _named(spec: ModelSpec, index: int, folder: Path) -> Iterator[None]:
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
            f"delete {folder}, if the machine may have stopped while it was written to; or set "
            "train.compile = false",
        ) from error


def _digest(what: object) -> str:
    identity = msgspec.json.encode(what, order="deterministic")
    return hashlib.blake2b(identity, digest_size=_KEY_BYTES).hexdigest()
