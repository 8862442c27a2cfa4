"""Rows are a function of the documents' lengths: every token is in one row at most, none is wider than it may
be, and few positions are left over.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleckd.protocol.job import parse_job
from oobleckd.tokens import packing
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.packing import PackRule, RowBlock, best_fit, pack, rule_of
from oobleckd.tokens.permutation import Permutation

Kind = Literal["packed", "padded"]
OnLong = Literal["cut", "skip", "fail"]


def starts_of(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *lengths])


def packed(
    lengths: list[int],
    sequence: int,
    kind: Kind = "packed",
    *,
    separate: bool = True,
    on_long: OnLong = "cut",
) -> list[RowBlock]:
    return list(pack(starts_of(lengths), PackRule(kind, sequence, separate, on_long)))


def rows_in(blocks: list[RowBlock]) -> list[list[tuple[int, int]]]:
    """Of each row the first token and the number of tokens of its pieces."""
    return [
        list(zip(block.tokens[start:stop].tolist(), block.lengths[start:stop].tolist(), strict=True))
        for block in blocks
        for start, stop in zip(block.row_starts[:-1], block.row_starts[1:], strict=True)
    ]


def targets_in(blocks: list[RowBlock]) -> list[int]:
    return [int(each) for block in blocks for each in block.targets]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BLOCK", 7)
    monkeypatch.setattr(packing, "_OPEN_ROWS", 2)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=60),
    st.integers(2, 16),
    st.sampled_from(["packed", "padded"]),
    st.booleans(),
    st.sampled_from(["cut", "skip"]),
)
@pytest.mark.usefixtures("small_blocks")
def test_every_token_is_once_in_a_row_or_in_one_that_asks_for_nothing(
    lengths: list[int], sequence: int, kind: Kind, separate: bool, on_long: OnLong
) -> None:
    blocks = packed(lengths, sequence, kind, separate=separate, on_long=on_long)
    rows, starts = rows_in(blocks), starts_of(lengths)
    seen = [token for row in rows for first, size in row for token in range(first, first + size)]
    assert len(seen) == len(set(seen))
    kept = [size for size in lengths if on_long == "cut" or size <= sequence]
    assert sum(block.long for block in blocks) == sum(size > sequence for size in lengths)
    lost = sum(kept) - len(seen)
    assert 0 <= lost <= sum(block.idle for block in blocks) * (1 if kind == "padded" else sequence)
    for row, targets in zip(rows, targets_in(blocks), strict=True):
        assert 0 < sum(size for _, size in row) <= sequence
        assert all(size > 0 for _, size in row)
        for first, size in row:  # within one document, and cut at whole rows
            document = int(np.searchsorted(starts, first, side="right")) - 1
            assert (first - starts[document]) % sequence == 0
            assert first + size in {starts[document + 1], first + sequence}
        assert kind == "packed" or len(row) == 1
        assert targets == sum(size for _, size in row) - (len(row) if separate else 1) > 0


def test_blocks_know_nothing_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BLOCK", 50)
    lengths = np.random.default_rng(0).integers(1, 60, 150).tolist()
    plain = packed(lengths, 32)
    order = Permutation(150, "pack")
    first = {order(position) for position in range(50)}
    others = [size if document in first else 33 for document, size in enumerate(lengths)]
    moved = packed(others, 32)[0]
    assert plain[0].lengths.tolist() == moved.lengths.tolist()
    assert plain[0].row_starts.tolist() == moved.row_starts.tolist()


def test_an_order_at_once_is_that_of_one_position_after_another() -> None:
    for size in (1, 2, 3, 100, 4097):
        order = Permutation(size, "x")
        positions = np.arange(size, dtype=np.uint64)
        assert order.many(positions).tolist() == [order(position) for position in range(size)]


def test_rows_are_always_the_same() -> None:
    """Their numbers are in checkpoints: who packs otherwise needs another format of plans."""
    lengths = [5, 3, 9, 0, 1, 4, 8, 2, 20, 6]
    assert rows_in(packed(lengths, 8)) == [
        [(8, 8)],
        [(32, 8)],
        [(40, 8)],
        [(17, 1), (18, 4), (16, 1)],
        [(22, 8)],
        [(52, 6), (30, 2)],
        [(5, 3), (0, 5)],
        [(48, 4)],
    ]


def test_rows_are_nearly_full() -> None:
    dice = np.random.default_rng(0)
    web = np.clip(dice.lognormal(6.2, 1.1, 20_000), 8, 60_000).astype(int).tolist()
    (block,) = packed(web, 2048)
    assert block.lengths.sum() == sum(web)
    assert sum(web) / (2048 * (len(block.row_starts) - 1)) > 0.99
    (padded,) = packed(web, 2048, "padded")
    assert len(padded.row_starts) - 1 == sum(-(-size // 2048) for size in web) - padded.idle


def test_best_fit_takes_the_fullest_row_that_has_room() -> None:
    assert best_fit([5, 6, 2, 3, 1], 8).tolist() == [0, 1, 1, 0, 2]
    assert best_fit([8, 8, 1], 8).tolist() == [0, 1, 2]
    assert best_fit([], 8).tolist() == []


@pytest.mark.usefixtures("small_blocks")
def test_of_too_many_open_rows_the_fullest_is_closed() -> None:
    assert best_fit([5, 6, 7, 1, 3], 8).tolist() == [0, 1, 2, 2, 0]
    assert best_fit([5, 6, 7, 1, 2, 2], 8).tolist() == [0, 1, 2, 2, 0, 3]


def test_a_row_of_single_tokens_asks_for_nothing_where_documents_are_separate() -> None:
    (block,) = packed([1, 1, 1], 3)
    assert (rows_in([block]), block.idle) == ([], 1)
    (block,) = packed([1, 1, 1], 3, separate=False)
    assert (len(rows_in([block])[0]), targets_in([block]), block.idle) == (3, [2], 0)


def test_long_documents_are_cut_left_out_or_refused() -> None:
    assert sorted(rows_in(packed([3, 10], 4))) == [[(0, 3)], [(3, 4)], [(7, 4)], [(11, 2)]]
    assert rows_in(packed([3, 10], 4, on_long="skip")) == [[(0, 3)]]
    with pytest.raises(DataError) as raised:
        packed([3, 10, 4, 5], 4, on_long="fail")
    assert "document 1 (from 0) has 10 tokens" in raised.value.problem
    assert "1 other" in raised.value.problem
    assert rows_in(packed([3, 4], 4, on_long="fail"))


class EverySecond:
    """The loss asks for tokens of odd numbers."""

    def mask(self, first: int, stop: int) -> npt.NDArray[np.bool_]:
        return np.arange(first, stop) % 2 == 1

    def counts(self, tokens: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (tokens + lengths) // 2 - tokens // 2


def test_targets_are_those_that_are_asked_for() -> None:
    starts = starts_of([1, 4, 1, 3])  # tokens 0 | 1 2 3 4 | 5 | 6 7 8
    rule = PackRule("padded", 4, separate=True, on_long="cut")
    (block,) = pack(starts, rule, EverySecond())
    found = {int(block.tokens[row]): int(block.targets[row]) for row in range(len(block.targets))}
    assert found == {1: 1, 6: 1}
    assert block.idle == 2


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ({}, None),
        ({"documents": "separate"}, None),
        ({"sequences": "packed"}, PackRule("packed", 16, separate=True, on_long="cut")),
        (
            {"sequences": "padded", "on_long_document": "skip"},
            PackRule("padded", 16, separate=True, on_long="skip"),
        ),
        (
            {"sequences": "packed", "documents": "joined"},
            PackRule("packed", 16, separate=False, on_long="cut"),
        ),
    ],
)
def test_the_rule_is_what_the_job_says(data: dict[str, str], rule: PackRule | None) -> None:
    table = {"source": "jsonl", "path": "t", "tokenizer": "t", **data}
    train = {"steps": 3, "global_batch": 4, "micro_batch": 2, "sequence": 16}
    assert rule_of(parse_job({"name": "a", "train": train, "data": table})) == rule
