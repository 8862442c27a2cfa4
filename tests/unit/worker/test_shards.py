"""What of each bucket the device of which rank holds: together all of it, once, and put together again the
same.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch

from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.worker.models import load_spec
from oobleckd.worker.reconfigure.reshard import Reshard
from oobleckd.worker.state.bucket_state import BucketState
from oobleckd.worker.state.shards import Shards
from oobleckd.worker.state.store import Store
from tests.helpers.engine_jobs import job
from tests.helpers.models import CPU

RULES = ("adamw", "muon", "adafactor")


def shards(tmp_path: Path, name: str, count: int, **config: int) -> Shards:
    spec = job(tmp_path)
    model = msgspec.structs.replace(spec.model, config={**spec.model.config, **config})
    changed = msgspec.structs.replace(spec, model=model, optimizer=Optimizer(name=name, lr=0.01))
    return Shards(load_spec(changed), CPU, count)


def drawn(of: Shards, bucket: int) -> BucketState:
    """A state of all of ``bucket`` in which no two numbers are alike."""
    shape = of.whole_shape(bucket)
    state = BucketState(shape, shape.zeros(CPU), tuple(range(len(of.spec.buckets[bucket].keys))))
    with torch.no_grad():
        for number, tensor in enumerate(state.tensors()):
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000.0 * number)
    return state


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("name", RULES)
def test_every_number_is_in_one_shard(tmp_path: Path, name: str, count: int) -> None:
    of = shards(tmp_path, name, count, n_embd=192)
    for bucket in of.spec.buckets:
        parts = sorted(part for rank in range(count) for part in of.shard(bucket.index, rank).parts)
        for one, other in pairwise(parts):
            assert one.key < other.key or one.end == other.begin
        sizes = of.slicing(bucket.index).sizes
        assert [sum(p.end - p.begin for p in parts if p.key == key) for key in range(len(sizes))] == list(
            sizes
        )
        assert all(part.begin % (1 << 15) == 0 for part in parts)
        if name != "adamw":
            matrices = {key for key, shape in enumerate(bucket.shapes) if len(shape) == 2 and bucket.index}
            assert all(part.end - part.begin == sizes[part.key] for part in parts if part.key in matrices)


@pytest.mark.parametrize("name", RULES)
def test_what_is_cut_and_put_together_is_the_same(tmp_path: Path, name: str) -> None:
    of = shards(tmp_path, name, 4, n_embd=192)
    for bucket in of.spec.buckets:
        whole = drawn(of, bucket.index)
        again = BucketState(whole.shape, whole.shape.zeros(CPU), whole.exponents)
        for rank in range(4):
            state = of.cut(bucket.index, rank, whole)
            assert state.exponents == whole.exponents
            views = {slot.name: state.views(slot.name) for slot in state.shape.slots}
            of.fill(bucket.index, rank, views, again)
        assert all(map(torch.equal, whole.storages(), again.storages()))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2), (8, 4)])
@pytest.mark.parametrize("name", RULES)
def test_shards_of_another_number_are_made_of_those_that_there_are(
    tmp_path: Path, name: str, before: int, after: int
) -> None:
    """And nothing is sent but what is needed."""
    had, wanted = (shards(tmp_path, name, number, n_embd=192) for number in (before, after))
    for bucket in range(len(had.spec.buckets)):
        whole = drawn(had, bucket)
        state = {old: had.cut(bucket, old, whole) for old in range(before)}
        for rank in range(after):
            store = Store(had.spec, CPU)
            store.divide(before, rank % before)
            store.buckets[bucket] = state[rank % before]
            reshard = Reshard.of(store, before, after, rank)
            complete = bool(reshard.begin([bucket], store))
            for old in sorted(reshard.missing[bucket]):
                its = Reshard(had, wanted, old, rank)
                assert old in its.senders(bucket, rank)
                sent = its.given(bucket, state[old], rank)
                complete = reshard.take(bucket, old, sent, whole.exponents)
            assert complete
            made, right = reshard.made(bucket), wanted.cut(bucket, rank, whole)
            assert all(map(torch.equal, right.storages(), made.storages()))
            assert made.exponents == whole.exponents
