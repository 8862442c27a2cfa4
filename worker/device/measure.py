"""What every layer of a model costs on this device: the planner's input.

Owns measuring: real layers on real shapes, one block for all blocks that are alike, a second or two in all.
"""

from __future__ import annotations

import hashlib
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from oobleckd.planner.costs import flops
from oobleckd.planner.profile import FLOAT_BYTES, ROUNDED_BYTES, LayerCost, Profile, gradient_bytes
from oobleckd.protocol.deaths import OUT_OF_MEMORY, account_of, ways_out
from oobleckd.protocol.job import Job
from oobleckd.worker import sums
from oobleckd.worker.device.sample import calls_of, sample_batch
from oobleckd.worker.models import (
    Batch,
    Call,
    Layer,
    ModelSpec,
    Owed,
    gradients,
    input_gradients,
    seed_layer,
    tensors_of,
)
from oobleckd.worker.optimizers.plan import check_groups
from oobleckd.worker.recompute.block import BlockInput, computed
from oobleckd.worker.runtime.card_memory import mapped_bytes
from oobleckd.worker.runtime.deaths import is_out_of_memory, memory_of
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.runtime.host_memory import most_of
from oobleckd.worker.state.bucket_state import BucketState, StateShape
from oobleckd.worker.state.digest import digest
from oobleckd.worker.state.optimizer import parameters_of, state_shape

_T = TypeVar("_T")
_VERSION = 7  # of what a profile means
_NUM_RUNS = 5
_PINNED_BYTES = 64 << 20
_BUDGET_S = 0.5
_SELECTIVE_BUDGET_S = 0.2


@dataclass(frozen=True, slots=True)
class _Cost:
    forward_s: float
    backward_s: float
    update_s: float
    activation_bytes: int
    output_bytes: int
    weight_s: float = 0.0
    kept_bytes: int = 0
    selective_bytes: int = 0
    selective_s: float = 0.0


def measure(spec: ModelSpec, job: Job, device: torch.device) -> Profile:
    """Costs of all layers of ``spec`` for one micro-batch of ``job`` on ``device``. Raises UserError when
    these do not fit its memory.

    Times are medians in seconds after a warm-up. ``state_bytes`` of a tied weight counts for every layer that
    uses it, since every holder has it. ``reserve_bytes`` is what the runtime holds on a GPU. Raises UserError
    where a layer cannot compute at all.
    """
    idle = most_of("self")
    check_groups(job.optimizer, [key for bucket in spec.buckets for key in bucket.keys])
    try:
        return _measure(spec, job, device)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        account = account_of(memory_of(device, error, idle))
        problem = f"out of memory while layers were measured, one at a time{account}"
        raise UserError(problem, ways_out(job), OUT_OF_MEMORY) from None


def _measure(spec: ModelSpec, job: Job, device: torch.device) -> Profile:
    batch = sample_batch(spec).to(device)
    with _computable():
        calls = calls_of(spec, batch)
    shared = {_storage(tensor): tensor for call in calls.values() for tensor in tensors_of(call)}
    known: dict[Any, _Cost] = {}
    costs: list[LayerCost] = []
    x: Tensor | None = None
    for index in range(spec.num_layers):
        alike = _likeness(spec, index)
        if alike not in known:
            with _computable():
                layer = bind(spec, index, device)
                selective = 0 < index < spec.num_layers - 1 and job.measures_selective
                measured = _Measured(layer, batch, calls.get(index), frozenset(shared), selective)
                known[alike], x = _measure_layer(measured, x, _SumOf(spec, index, device))
        costs.append(_layer_cost(spec, index, known[alike]))
    # Here alone is the model seen whole, whatever its family and wherever it comes from. (D-progress-001)
    return Profile(
        key=profile_key(job, device),
        device=_device_name(device),
        layers=tuple(costs),
        reserve_bytes=_reserve_bytes(device),
        buckets=tuple(bucket.uses for bucket in spec.buckets),
        host_bytes_per_s=_host_bytes_per_s(device),
        shared_bytes=sum(tensor.untyped_storage().nbytes() for tensor in shared.values()),
        flops_per_token=flops.per_token(
            spec.num_weights, spec.num_layers - 2, spec.attention, job.train.sequence
        ),
        params=spec.num_params,
        active_params=spec.num_active_params,
    )


@contextmanager
def _computable() -> Iterator[None]:
    """Fields of a configuration that do not fit together may show in the first block that computes. Too
    little memory is another matter, and so is a device that fails: these are errors of their own kinds.
    """
    try:
        yield
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        plain = type(error) in {RuntimeError, ValueError, TypeError, IndexError}
        if not plain or is_out_of_memory(error):
            raise
        raise UserError(
            f"model.config: the model cannot compute a micro-batch: {' '.join(str(error).split())}",
            "mend the sizes that the message is about",
        ) from error


def profile_key(job: Job, device: torch.device) -> str:
    """Identity of a profile: model, shapes, precision, exactness and the kind of device."""
    what = (_VERSION, job.costs_depend_on, _device_name(device))
    identity = msgspec.json.encode(what, order="deterministic")
    return hashlib.blake2b(identity, digest_size=16).hexdigest()


def state_bytes(shape: StateShape, exact: bool, num_rounded: int = 0) -> int:
    """Memory of parameters and all that lives with them in one layer, in bytes. ``num_rounded``: of how many
    there is a copy in bfloat16.
    """
    return shape.num_bytes + gradient_bytes(exact) * shape.num_params + ROUNDED_BYTES * num_rounded


def _num_rounded(spec: ModelSpec, index: int) -> int:
    rounded = spec.rounded(index)
    return sum(
        math.prod(shape)
        for bucket in spec.buckets_of(index)
        for key, shape in zip(spec.buckets[bucket].keys, spec.buckets[bucket].shapes, strict=True)
        if key in rounded
    )


def _shape_of(spec: ModelSpec, index: int) -> StateShape:
    """Of the state of all parameters that a layer uses."""
    return state_shape(spec.job.optimizer, parameters_of(spec, spec.buckets_of(index)))


def _likeness(spec: ModelSpec, index: int) -> Any:
    """What two blocks must have in common to cost the same; embedding and head are like nothing else."""
    if index in {0, spec.num_layers - 1}:
        return index
    return spec.kind_of(index), _shape_of(spec, index).slots


def bind(spec: ModelSpec, index: int, device: torch.device) -> Layer:
    """Layer ``index`` with fresh weights of its own."""
    rounded = spec.rounded(index)
    params = {
        key: (value.bfloat16() if key in rounded else value).requires_grad_()
        for bucket in spec.buckets_of(index)
        for key, value in zip(spec.buckets[bucket].keys, spec.init(bucket, device), strict=True)
    }
    return spec.layer(index, params, device)


def _layer_cost(spec: ModelSpec, index: int, cost: _Cost) -> LayerCost:
    shape = _shape_of(spec, index)
    names = {0: "embedding", spec.num_layers - 1: "head"}
    return LayerCost(
        names.get(index, f"block {index - 1}"),
        cost.forward_s,
        cost.backward_s,
        FLOAT_BYTES * shape.num_params,
        state_bytes(shape, spec.job.train.exact, _num_rounded(spec, index)),
        cost.activation_bytes,
        cost.output_bytes,
        update_s=cost.update_s,
        weight_s=cost.weight_s,
        kept_bytes=cost.kept_bytes,
        slot_bytes=shape.num_bytes - FLOAT_BYTES * shape.num_params,
        selective_bytes=cost.selective_bytes,
        selective_s=cost.selective_s,
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """A layer and what it computes with besides ``x``. ``shared``: storages that count for no layer.
    ``selective``: whether it is asked what it costs where that which is cheap is computed again.
    """

    layer: Layer
    batch: Batch
    call: Call | None
    shared: frozenset[int]
    selective: bool = False

    def __call__(self, x: Tensor | None) -> Tensor:
        return self.layer(x, self.batch, self.call)


def _measure_layer(measured: _Measured, x: Tensor | None, sum_of: _SumOf) -> tuple[_Cost, Tensor]:
    """The cost of a layer on ``x``, and its output."""
    layer, device = measured.layer, sum_of.device
    if x is not None:
        x = x.detach().requires_grad_()
    seed_layer(sum_of.seed, 0, 0, layer.index, device)
    out, activation_bytes = _activations(measured, x)
    step = (_Apart if layer.apart else _Fused)(measured, x, sum_of)
    times: list[tuple[float, ...]] = []
    began = time.perf_counter()
    step.run(device)
    while len(times) < _NUM_RUNS and (not times or time.perf_counter() - began < _BUDGET_S):
        times.append(step.run(device))
    forward_s, backward_s, weight_s, update_s = map(statistics.median, zip(*times, strict=True))
    selective: tuple[int, float] = (0, 0.0)
    if measured.selective and x is not None:
        selective = _selective(measured, x, step.forward)
    cost = _Cost(
        forward_s,
        backward_s + weight_s,
        update_s,
        activation_bytes,
        out.nbytes,
        weight_s,
        step.kept_bytes,
        *selective,
    )
    return cost, out.detach()


def _selective(measured: _Measured, x: Tensor, forward: Callable[[], Tensor]) -> tuple[int, float]:
    """What a block holds whose products are kept and all else is computed again, and the seconds that this
    takes: of the second forward pass, and of the first what it takes longer than ``forward``.
    """
    layer, device = measured.layer, x.device

    def first() -> BlockInput:
        return computed(layer, x, measured.call, 1.0, apart=layer.apart, keeps_products=True)[1]

    held = first()
    assert held.products is not None
    others = {_storage(param) for param in layer.leaves} | measured.shared
    kept = {_storage(t): t.untyped_storage().nbytes() for t in (x, *held.products.tensors)}
    held.again(layer, lambda: None)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < _NUM_RUNS and (not times or time.perf_counter() - began < _SELECTIVE_BUDGET_S):
        _, plain_s = _timed(forward, device)
        held, first_s = _timed(first, device)
        _, again_s = _timed(partial(held.again, layer, lambda: None), device)
        times.append(again_s + max(0.0, first_s - plain_s))
    return sum(num for where, num in kept.items() if where not in others), statistics.median(times)


class _Fused:
    """A layer's forward, backward and update for one micro-batch."""

    kept_bytes = 0

    def __init__(self, measured: _Measured, x: Tensor | None, sum_of: _SumOf) -> None:
        self.measured, self.layer, self.x, self.sum_of = measured, measured.layer, x, sum_of
        self.inputs = self.layer.leaves if x is None else [*self.layer.leaves, x]

    def seed(self) -> None:
        """As before every forward: dropout is a function of where it is."""
        seed_layer(self.sum_of.seed, 0, 0, self.layer.index, self.sum_of.device)

    def forward(self) -> Tensor:
        """The layer's output."""
        self.seed()
        return self.measured(self.x)

    def run(self, device: torch.device) -> tuple[float, float, float, float]:
        """Seconds of the forward, of the backward, of weight gradients apart from it, of the update."""
        out, forward_s = _timed(self.forward, device)
        top = torch.ones_like(out)
        _, backward_s = _timed(lambda: self.sum_of.add(gradients(out, self.inputs, top)), device)
        _, update_s = _timed(self.sum_of.update, device)
        return forward_s, backward_s, 0.0, update_s


class _Apart(_Fused):
    """The same with a decoupled backward. ``kept_bytes``: what lies between I and W."""

    def forward_apart(self) -> tuple[Tensor, Owed]:
        """The layer's output, and what its weight gradients are computed from later."""
        self.seed()
        return self.layer.forward_apart(self.x, self.measured.batch, self.measured.call)

    def run(self, device: torch.device) -> tuple[float, float, float, float]:
        """As of a fused one; the backward is then I alone."""
        (out, owed), forward_s = _timed(self.forward_apart, device)
        top = torch.ones_like(out)
        grads, input_s = _timed(lambda: input_gradients(out, self.inputs, top, owed), device)
        self.kept_bytes = owed.num_bytes
        leaves = self.layer.leaves
        found = grads[: len(leaves)]
        _, weight_s = _timed(lambda: self.sum_of.add(owed.complete(leaves, found)), device)
        _, update_s = _timed(self.sum_of.update, device)
        return forward_s, input_s, weight_s, update_s


class _SumOf:
    """What becomes of a layer's gradients: added up by micro-batch, and once a step an update (``reduce``,
    ``update``), where it is asked for with a guard around the sums and a digest of the state (``integrity``).
    """

    def __init__(self, spec: ModelSpec, index: int, device: torch.device) -> None:
        job, shape, rounded = spec.job, _shape_of(spec, index), spec.rounded(index)
        keys = [key for bucket in spec.buckets_of(index) for key in spec.buckets[bucket].keys]
        self.seed, self.device = job.train.seed, device
        self._exact, self._checks_every = job.train.exact, job.fault_tolerance.check_every
        shapes = [place.shape for slot in shape.slots[:1] for place in slot.places]
        self._slicing = sums.slicing(shapes, device)
        self._exponents = (0,) * len(shapes)  # with which nothing overflows
        self._state = BucketState(shape, shape.zeros(device), self._exponents)
        self._state.keep_rounded([position for position, key in enumerate(keys) if key in rounded])
        self._sum = sums.empty(shapes, self._exact, device, guarded=self._checks_every > 0)

    def add(self, grads: Sequence[Tensor]) -> None:
        """One micro-batch; ``grads`` may have that of the input behind them."""
        self._sum.add(grads[: len(self._exponents)], self._exponents, 1)

    def update(self) -> None:
        """From the sums to new weights; the next micro-batch is the first of a step."""
        tensors = self._sum.tensors  # which looks at the memory, and marks what it finds
        marks, slicing, exponents = self._sum.marks, self._slicing, self._exponents
        mean = [torch.empty(tensor.shape, device=self.device) for tensor in tensors]
        figures = sums.finish([tensors], exponents, 1.0, mean, slicing.chunk, exact=self._exact)
        told = torch.cat((marks, figures.view(-1))).tolist()
        of_sums, rest = told[: sums.NUM_MARKS], told[sums.NUM_MARKS :]
        sums.decode(of_sums, rest, slicing, exponents, 1, exact=self._exact)
        self._state.update_(mean, applied=1, lr=1e-9)
        self._sum.zero_()
        if self._checks_every == 1:  # of more steps than one it is no part of a usual step
            digest(self._state.storages(), self._exponents, self._state.wrong_copies())


def _activations(measured: _Measured, x: Tensor | None) -> tuple[Tensor, int]:
    """One forward pass, and the bytes that it keeps for the backward pass besides the parameters and what is
    shared.
    """
    kept: dict[int, int] = {}
    others = {_storage(param) for param in measured.layer.leaves} | measured.shared

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in others:
            kept[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = measured(x)
    return out, sum(kept.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _timed(act: Callable[[], _T], device: torch.device) -> tuple[_T, float]:
    began = time.perf_counter()
    result = act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - began


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}, {torch.get_num_threads()} threads"


def _host_bytes_per_s(device: torch.device) -> float:
    """How fast pinned memory of the host is copied to a GPU; 0 where the device's memory is the host's."""
    if device.type != "cuda":
        return 0.0
    there = torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty_like(there, device=device)
    times = [_timed(lambda: here.copy_(there, non_blocking=True), device)[1] for _ in range(_NUM_RUNS)]
    return _PINNED_BYTES / min(times)


def _reserve_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    free, whole = torch.cuda.mem_get_info(device)
    return whole - free - torch.cuda.memory_reserved(device) - mapped_bytes(device)
