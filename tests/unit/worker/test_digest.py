"""Digests of state: any flipped bit shows, on the host and as accelerators compute them."""

from __future__ import annotations

import pytest
import torch

from oobleckd.worker.state.digest import digest, digests


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in [(3, 5), (7,), ()]]


def flipped(where: int, bit: int) -> list[torch.Tensor]:
    found = tensors()
    flat = found[0].view(-1).view(torch.int32)
    flat[where] ^= (1 << bit) if bit < 31 else -(2**31)
    return found


def test_equal_bits_have_equal_digests() -> None:
    assert digest(tensors(), (1, 2)) == digest(tensors(), (1, 2))
    assert 0 <= digest(tensors(), ()) < 2**64


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_shows(bit: int) -> None:
    assert digest(flipped(bit % 15, bit), (1,)) != digest(tensors(), (1,))


def test_digests_of_many_are_those_of_each() -> None:
    states = [
        (tensors(), (1,), None),
        ([], (2,), None),
        (flipped(3, 4), (1,), None),
        ([torch.randn(100_001)], (), None),
        (tensors(), (1,), torch.tensor(3)),
    ]
    found = digests(states)
    assert found == [digest(*state) for state in states]
    assert len(set(found)) == 5
    assert digest(tensors(), (1,), torch.tensor(0)) == found[0]
    assert digests([]) == []


def test_exponents_and_the_sign_of_zero_show() -> None:
    assert digest(tensors(), (1,)) != digest(tensors(), (2,))
    assert digest([torch.zeros(3)], ()) != digest([-torch.zeros(3)], ())


@pytest.mark.parametrize("size", [1, 2, 2047, 2048, 2049, 100_001])
@pytest.mark.parametrize("bit", [0, 12, 31])
def test_every_bit_of_a_large_tensor_shows(size: int, bit: int) -> None:
    """In a row, at its end, and in what fills none."""
    generator = torch.Generator().manual_seed(size)
    right = torch.randn(size, generator=generator)
    for where in {0, size // 2, size - 1}:
        wrong = right.clone()
        wrong.view(torch.int32)[where] ^= (1 << bit) if bit < 31 else -(2**31)
        assert digest([wrong], ()) != digest([right], ())


@pytest.mark.parametrize(("one", "other"), [(0, 1), (0, 2), (10, 2048), (3, 2051), (5, 9000)])
def test_numbers_that_change_places_show(one: int, other: int) -> None:
    right = torch.randn(10_000, generator=torch.Generator().manual_seed(3))
    wrong = right.clone()
    wrong[one], wrong[other] = right[other], right[one]
    assert digest([wrong], ()) != digest([right], ())


def test_a_view_that_begins_anywhere_has_the_digest_of_its_numbers() -> None:
    memory = torch.randn(5001, generator=torch.Generator().manual_seed(4))
    assert digest([memory[1:]], ()) == digest([memory[1:].clone()], ())
