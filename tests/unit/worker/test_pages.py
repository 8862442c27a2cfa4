"""Memory for large messages: used again, given back, and never while somebody has it."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from oobleckd.worker.transport.pages import Pages

MIB = 1 << 20


def tensor_of(pages: Pages, num_bytes: int) -> Tensor:
    return torch.frombuffer(pages.take(num_bytes), dtype=torch.uint8)


def test_the_next_message_gets_the_memory_of_one_that_nobody_has() -> None:
    pages = Pages()
    first = tensor_of(pages, MIB)
    at = first.data_ptr()
    view = first[10:20]
    del first
    assert pages.idle_bytes == 0  # a view is enough
    del view
    assert pages.idle_bytes == MIB
    assert tensor_of(pages, MIB).data_ptr() == at


def test_what_somebody_has_is_given_to_nobody() -> None:
    pages = Pages()
    all_of_them = [tensor_of(pages, MIB).fill_(number) for number in range(5)]
    assert len({each.data_ptr() for each in all_of_them}) == 5
    assert [int(each[0]) for each in all_of_them] == list(range(5))


def test_memory_of_about_the_size_does_and_no_other() -> None:
    pages = Pages()
    tensor_of(pages, 4 * MIB)
    assert pages.idle_bytes == 4 * MIB
    small = tensor_of(pages, MIB)
    assert small.numel() == MIB
    large = tensor_of(pages, 4 * MIB + 1)
    assert large.numel() == 4 * MIB + 1
    assert pages.idle_bytes == 4 * MIB
    alike = tensor_of(pages, 3 * MIB + MIB // 2)
    assert alike.numel() == 4 * MIB
    assert pages.idle_bytes == 0


def test_no_more_lies_idle_than_two_of_the_largest() -> None:
    pages = Pages()
    burst = [tensor_of(pages, MIB) for _ in range(6)]
    burst.append(tensor_of(pages, 3 * MIB))
    del burst
    assert MIB <= pages.idle_bytes <= 6 * MIB
    pages.clear()
    assert pages.idle_bytes == 0


@pytest.mark.parametrize("aligned", [0, 64, 4096])
def test_tensors_lie_as_torch_aligns_them(aligned: int) -> None:
    memory = Pages().take(MIB)
    assert torch.frombuffer(memory, dtype=torch.float64, count=8, offset=aligned).data_ptr() % 64 == 0


def test_many_threads() -> None:
    pages = Pages()
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(200):
            mine = tensor_of(pages, MIB + 4096 * (number % 3)).fill_(number)
            if not bool((mine == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
