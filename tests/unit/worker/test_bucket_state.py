"""The state of a bucket: one storage for each slot, views of it by key, and the same bits as apart."""

from __future__ import annotations

import pytest
import torch

from oobleckd.protocol.joboptimizer import Optimizer
from oobleckd.worker.state.bucket_state import ALIGNED_BYTES, BucketState
from oobleckd.worker.state.digest import digest
from tests.helpers.optimizers import drawn, shape_of, trained

SHAPES: list[tuple[int, ...]] = [(3,), (17, 5), (), (64, 64)]
ADAFACTOR = Optimizer(name="adafactor")


@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer(state="bf16"), ADAFACTOR])
def test_keys_are_views_of_one_storage_at_aligned_places(optimizer: Optimizer) -> None:
    state = BucketState.fresh(shape_of(SHAPES, optimizer), drawn(SHAPES, 0))
    for slot in state.shape.slots:
        flat = state.flats[slot.name]
        assert flat.shape == (slot.length,)
        for place in slot.places:
            view = state.views(slot.name)[place.key]
            assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            assert torch.equal(flat[place.begin : place.end], view.detach().reshape(-1))
            assert place.begin * flat.element_size() % ALIGNED_BYTES == 0
            assert tuple(view.shape) == place.shape
    assert all(map(torch.equal, state.params, drawn(SHAPES, 0)))
    assert all(param.is_leaf and param.requires_grad for param in state.params)


def test_slots_have_the_shapes_that_a_rule_says() -> None:
    state = BucketState.fresh(shape_of(SHAPES, ADAFACTOR), drawn(SHAPES, 0))
    assert {key: tuple(view.shape) for key, view in state.views("row_var").items()} == {
        1: (17, 1),
        3: (64, 1),
    }
    assert {key: tuple(view.shape) for key, view in state.views("variance").items()} == {0: (3,), 2: ()}
    names = state.named(("a", "b", "c", "d"))
    assert [name for name in names if name.startswith("col_var/")] == ["col_var/b", "col_var/d"]
    assert state.num_bytes == sum(tensor.nbytes for tensor in names.values())


@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer(state="bf16"), ADAFACTOR])
def test_a_copy_a_message_and_what_is_restored_are_the_state(optimizer: Optimizer) -> None:
    state = trained(SHAPES, optimizer, 2, 0.01)
    copy = state.copied(torch.Tensor.clone)
    received = BucketState.received(state.shape, [flat.clone() for flat in state.storages()], state.exponents)
    saved, before = state.save(), digest(state.tensors(), state.exponents)
    state.update_(drawn(SHAPES, 9), applied=2, lr=0.01)
    assert digest(state.tensors(), state.exponents) != before
    for other in (copy, received):
        assert digest(other.tensors(), other.exponents) == before
    leaf = state.params[1]
    state.restore(saved)
    assert digest(state.tensors(), state.exponents) == before
    assert state.params[1] is leaf


def test_gaps_show_in_no_digest() -> None:
    state = trained(SHAPES, Optimizer(), 1, 0.01)
    apart = [tensor.clone() for tensor in state.tensors()]
    assert digest(state.tensors(), (1,)) == digest(apart, (1,))


@pytest.mark.parametrize("size", [1, 2, 3, 4097])
def test_every_bit_of_a_narrow_slot_shows(size: int) -> None:
    right = torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16()
    for where in {0, size // 2, size - 1}:
        wrong = right.clone()
        wrong.view(torch.int16)[where] ^= 1
        assert digest([wrong], ()) != digest([right], ())


def test_autograd_sees_an_update_between_forward_and_backward() -> None:
    """Through the storage as through a view: what was saved is not what is there."""
    state = BucketState.fresh(shape_of([(4,)]), drawn([(4,)], 0))
    loss = (state.params[0] ** 2).sum()
    state.restore(state.save())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_rounded_copies_follow_the_parameters_and_are_no_part_of_the_state() -> None:
    state = trained(SHAPES, Optimizer(), 2, 0.01)
    before, num_bytes = digest(state.tensors(), state.exponents), state.num_bytes
    assert state.wrong_copies() is None
    state.keep_rounded([3, 1])
    kept = dict(state.rounded)
    assert list(kept) == [1, 3]

    def check() -> None:
        assert state.rounded == kept
        for key, leaf in state.rounded.items():
            assert leaf.is_leaf
            assert leaf.requires_grad
            assert leaf.data_ptr() % ALIGNED_BYTES == kept[1].data_ptr() % ALIGNED_BYTES
            assert torch.equal(leaf, state.params[key].to(torch.bfloat16))
        assert state.wrong_copies() == 0

    check()
    assert (digest(state.tensors(), state.exponents, state.wrong_copies()), state.num_bytes) == (
        before,
        num_bytes,
    )
    saved = state.save()
    state.update_(drawn(SHAPES, 9), applied=2, lr=0.01)
    check()
    state.restore(saved)
    check()
    state.keep_rounded([1, 3])
    check()
    assert not state.copied(torch.Tensor.clone).rounded
    assert not BucketState.received(state.shape, state.storages(), state.exponents).rounded
    state.keep_rounded([])
    assert not state.rounded


@pytest.mark.parametrize("bit", [0, 6, 15])
def test_every_bit_of_a_rounded_copy_shows(bit: int) -> None:
    state = trained(SHAPES, Optimizer(), 2, 0.01)
    state.keep_rounded([1, 3])
    right = digest(state.tensors(), state.exponents, state.wrong_copies())
    for key, where in ((1, 0), (3, 4095)):
        word = state.rounded[key].detach().view(torch.int16).view(-1)
        word[where] ^= 1 << bit if bit < 15 else -(1 << 15)
        assert digest(state.tensors(), state.exponents, state.wrong_copies()) != right
        state.keep_rounded([1, 3])
    assert digest(state.tensors(), state.exponents, state.wrong_copies()) == right


def test_autograd_sees_that_a_rounded_copy_is_made_anew() -> None:
    state = BucketState.fresh(shape_of([(4,)]), drawn([(4,)], 0))
    state.keep_rounded([0])
    loss = (state.rounded[0] ** 2).sum()
    state.update_(drawn([(4,)], 1), applied=0, lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
