"""The canary of a device: what it comes to when it computes each kind of layer of a job once.

Owns what is computed, and its digest. Embedding, one block of each kind and the head run forward and backward
on fixed weights and inputs, at the job's precision and shapes, set up as for training; a block's gradients go
through sums, norms and one update. Devices with equal digests come to equal bits, whatever versions they say
(``oobleckd.protocol.traits``); what follows is the daemon's.

Of a job that compiles these are its compiled layers, at its own shapes, since others would be other programs.
Else shapes are shortened by a rule that looks at the job and the kind of device alone, and never at a clock,
so that all devices of a kind compute the same: first rows, then the sequence, until it is done in a second.
All numbers that go in are made of integers, so that no library's random numbers show.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from oobleckd.planner.profile import FLOAT_BYTES
from oobleckd.protocol.job import Job
from oobleckd.protocol.modelnotes import AttentionNote, attention_words
from oobleckd.protocol.traits import CANARY, Traits, canary_words
from oobleckd.worker import sums
from oobleckd.worker.canary.attention import Listener, dtype_of, note_on
from oobleckd.worker.models import Batch, Call, Layer, ModelSpec, gradients, seed_layer
from oobleckd.worker.runtime.deaths import is_out_of_memory
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.digest import digest
from oobleckd.worker.state.optimizer import parameters_of, state_shape

_VERSION = 1  # of what is computed
_FLOPS = {"cpu": 15e9, "cuda": 4e12}
"""What all layers together may cost: less than a second on one core, or on a card that is slow in float32."""
_OF_NUMBER = 100
"""As many FLOPs as it takes to make a weight, and to go through it and its gradient."""
_BYTES = {"cpu": 1 << 29, "cuda": 1 << 34}
"""What the weights of the largest layer may take: as much again is held for its gradients."""
_SHORTEST = 16
_PERIOD = 65_521
"""A prime: rows of a matrix differ, whatever its width."""
_LR = 2.0**-7
_log = logging.getLogger(__name__)


class Canary:
    """Of one device. ``inherited``: traits of the process that had its place before."""

    def __init__(self, device: str, torch_device: torch.device, inherited: Traits) -> None:
        self._device, self._torch_device = device, torch_device
        self._inherited = inherited
        self._known: dict[tuple[str, int], str] = {}
        self.said = ""

    def traits(self, own: dict[str, str]) -> dict[str, str]:
        """``own`` traits of the device, and the canary where there is one."""
        return own | {CANARY: self.said} if self.said else own

    def sing(self, spec: ModelSpec, own: Traits) -> None:
        """Have the canary of the job of ``spec`` on a device that has ``own`` traits: computed once in the
        life of its place, as another process there comes to the same. Its layers are compiled, where the job
        compiles.
        """
        of, constants = subject(spec.job), constants_digest(spec)
        known = self._known.get((of, constants))
        if known is None:
            known = self._of_before(of, own) or self._computed(spec, of)
            self._known[of, constants] = known
        self.said = known

    def _of_before(self, of: str, own: Traits) -> str:
        """What the process before said, where that is this one in all that decides bits."""
        # A spare takes its place in the middle of a repair, which no canary is to make longer: the place has
        # had its own before. (D-exactness-018)
        before = dict(self._inherited)
        said = before.pop(CANARY, "")
        return said if before == dict(own) and said.endswith(canary_words("", of)) else ""

    def _computed(self, spec: ModelSpec, of: str) -> str:
        began = time.perf_counter()
        found = sung(spec, self._torch_device)
        took_s = time.perf_counter() - began
        if found is None:
            _log.info("%s: no canary of bits: a layer is too large; versions decide", self._device)
            return ""
        _log.info("%s: canary of bits %s in %.2f s", self._device, found.digest, took_s)
        if spec.job.train.compile:
            return canary_words(found.digest, of)  # what a program does for attention only the compiler knows
        shape, attention = " x ".join(map(str, found.shape)), attention_words(found.attention)
        _log.info("%s: attention, at %s tokens: %s", self._device, shape, attention)
        return canary_words(found.digest, of)


def subject(job: Job) -> str:
    """What of ``job`` a canary is of, in 8 hex digits: canaries of jobs that agree in it can be compared."""
    train = job.train
    shapes = (
        train.micro_batch,
        train.sequence,
        train.precision,
        train.exact,
        job.data.is_separate,
        train.loss_chunk_size,
    )
    said: tuple[str, ...] = ("compiled",) if train.compile else ()
    said += ("experts in bf16",) if train.experts_precision == "bf16" else ()
    what = msgspec.json.encode((_VERSION, job.model, shapes, job.optimizer, *said), order="deterministic")
    return hashlib.blake2b(what, digest_size=4).hexdigest()


def constants_digest(spec: ModelSpec) -> int:
    """Of what the model has besides parameters (``ModelSpec.constants``); 0 where it has nothing. Each node
    reads it from a folder of its own, and nothing that nodes compare in a step has it.
    """
    return digest([spec.constant(name) for name in sorted(spec.constants)], ()) if spec.constants else 0


@dataclass(frozen=True, slots=True)
class Sung:
    """What came of a canary: its ``digest``, 16 hex digits; ``attention``: which kernels computed that, at
    ``shape`` (rows, tokens of each).
    """

    digest: str
    shape: tuple[int, int]
    attention: tuple[AttentionNote, ...]


def sung(spec: ModelSpec, device: torch.device) -> Sung | None:
    """The canary of a job's model on ``device``; None where a layer is too large to be computed in a second,
    or finds no memory.
    """
    layers = kinds(spec)
    shape = shape_of(spec, layers, device.type)
    if shape is None:
        return None
    try:
        return _sing(spec, layers, shape, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return None


def kinds(spec: ModelSpec) -> dict[int, int]:
    """The layers that are computed: embedding, the first block of each kind, and the head; of each how many
    there are of it.
    """
    first: dict[Any, int] = {}
    found = {0: 1}
    for index in range(1, spec.num_layers - 1):
        shapes = tuple(spec.buckets[bucket].shapes for bucket in spec.buckets_of(index))
        alike = first.setdefault((spec.kind_of(index), spec.attention_kind(index), shapes), index)
        found[alike] = found.get(alike, 0) + 1
    return found | {spec.num_layers - 1: 1}


def shape_of(spec: ModelSpec, layers: Collection[int], kind: str) -> tuple[int, int] | None:
    """Rows and tokens of a row for a device of ``kind``; None where even the shortest would take too long.

    At most the job's, and these where it compiles: what it has compiled computes no others. A token costs 6
    FLOPs a weight that it is multiplied with, and attention 12 a token of its row and number of its width.
    """
    embedding, *others = (_numbers(spec, index) for index in layers)
    if FLOAT_BYTES * max(embedding, *others) > _BYTES[kind]:
        return None
    rows, length = spec.job.train.micro_batch, spec.job.train.sequence
    if spec.job.train.compile:
        return rows, length
    left = _FLOPS[kind] - _OF_NUMBER * (embedding + sum(others))
    attention = 12 * spec.attention * (len(layers) - 2)
    while rows * length * (6 * sum(others) + attention * length) > left:
        if rows > 1:
            rows //= 2
        elif length > _SHORTEST:
            length = max(_SHORTEST, length // 2)
        else:
            return None
    return rows, length


def _numbers(spec: ModelSpec, layer: int) -> int:
    shapes = (shape for bucket in spec.buckets_of(layer) for shape in spec.buckets[bucket].shapes)
    return sum(map(math.prod, shapes))


def _sing(spec: ModelSpec, layers: Mapping[int, int], shape: tuple[int, int], device: torch.device) -> Sung:
    heard = hashlib.blake2b(digest_size=8)
    batch = _batch(spec, shape).to(device)
    calls = spec.calls_for(batch)
    x: Tensor | None = None
    attention: list[AttentionNote] = []
    for index, blocks in layers.items():
        part = _Part(spec, index, device, lambda found: heard.update(digest(found, ()).to_bytes(8, "little")))
        listener = Listener(dtype_of(spec))
        # Whoever listens is part of what a program is compiled for, and these are compiled already.
        with nullcontext() if spec.job.train.compile else listener:
            x = part.sing(x, batch, calls.get(index))
        if index in calls and not spec.job.train.compile:
            attention.append(note_on(listener.heard, blocks, device))
    if spec.constants:
        heard.update(constants_digest(spec).to_bytes(8, "little"))
    return Sung(heard.hexdigest(), shape, tuple(attention))


def _batch(spec: ModelSpec, shape: tuple[int, int]) -> Batch:
    """Every row has two documents where these are kept apart."""
    vocabulary = spec.config.vocab_size
    tokens = (torch.arange(math.prod(shape)) * 7919 + 1).remainder(vocabulary).view(shape)
    if not spec.job.data.is_separate:
        return Batch(tokens, tokens)
    half = (shape[1] + 1) // 2
    at = torch.arange(shape[1]).expand(shape)
    return Batch(tokens, tokens, at % half, at // half, tokens.numel())


@dataclass(frozen=True, slots=True)
class _Part:
    """Layer ``index`` of ``spec`` on ``device``. ``note``: is given all that it comes to."""

    spec: ModelSpec
    index: int
    device: torch.device
    note: Callable[[Sequence[Tensor]], None]

    def sing(self, x: Tensor | None, batch: Batch, call: Call | None) -> Tensor:
        """Forward and backward, and of a block norms and an update. ``x``: of the shape and dtype that come
        in. Returns what comes out, detached.
        """
        layer = self._bound()
        if x is not None:
            x = _fixed(tuple(x.shape), self.index, self.device).to(x.dtype).requires_grad_()
        seed_layer(0, 0, 0, self.index, self.device)
        out = layer(x, batch, call)
        self.note([out])
        top = _fixed(tuple(out.shape), self.index + 1, self.device).to(out.dtype) if out.dim() else None
        grads = gradients(out, [*layer.leaves, *([] if x is None else [x])], top)
        self.note(grads)
        if 0 < self.index < self.spec.num_layers - 1:
            self._update(grads[: len(layer.leaves)])
        return out.detach()

    def _bound(self) -> Layer:
        """The layer with fixed weights."""
        buckets = [self.spec.buckets[bucket] for bucket in self.spec.buckets_of(self.index)]
        rounded = self.spec.rounded(self.index)
        keys = [pair for bucket in buckets for pair in zip(bucket.keys, bucket.shapes, strict=True)]
        params: dict[str, Tensor] = {}
        for number, (key, shape) in enumerate(keys):
            weight = _fixed(shape, number, self.device).mul_(2.0**-3)
            params[key] = (weight.bfloat16() if key in rounded else weight).requires_grad_()
        return self.spec.layer(self.index, params, self.device)

    def _update(self, grads: Sequence[Tensor]) -> None:
        job = self.spec.job
        shape = state_shape(job.optimizer, parameters_of(self.spec, self.spec.buckets_of(self.index)))
        exponents = (sums.START_EXPONENT,) * len(grads)
        found = sums.empty([tuple(grad.shape) for grad in grads], job.train.exact, self.device)
        found.add(grads, exponents, 1)
        tensors = found.tensors  # which looks at the memory, and marks what it finds
        mean = [torch.empty(tensor.shape, device=self.device) for tensor in tensors]
        chunk = sums.slicing([tuple(grad.shape) for grad in grads], self.device).chunk
        figures = sums.finish([tensors], exponents, 1.0, mean, chunk, exact=job.train.exact)
        self.note([found.marks, figures])
        state = BucketState(shape, shape.zeros(self.device), exponents)
        state.update_(mean, applied=1, lr=_LR)
        self.note(state.tensors())


def _fixed(shape: tuple[int, ...], number: int, device: torch.device) -> Tensor:
    """Float32 numbers of ``shape`` between -0.5 and 0.5, others for each ``number``: of integers, so that
    they are the same with every library.
    """
    at = torch.arange(_PERIOD, dtype=torch.int64) + 7919 * number
    base = ((at * at * 40_503 + at).remainder(_PERIOD) - _PERIOD // 2).to(torch.float32).mul_(2.0**-16)
    count = math.prod(shape)
    return base.to(device).repeat(-(-count // _PERIOD))[:count].view(shape)
