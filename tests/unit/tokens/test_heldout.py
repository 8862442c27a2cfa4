"""Which documents are held out: a function of a seed and a number, and no float that another machine rounds
otherwise.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest

from oobleckd.protocol.job import parse_job
from oobleckd.tokens import index as index_module
from oobleckd.tokens.heldout import DocumentSide, side_of
from oobleckd.tokens.index import read_index, write_index
from oobleckd.tokens.packing import PackRule, pack, rule_of

MASK = 2**64 - 1


def drawn(seed: int, document: int, millionths: int) -> bool:
    """By splitmix64 as it is published, in Python's integers."""
    key = int.from_bytes(hashlib.blake2b(f"held out:{seed}".encode(), digest_size=8).digest(), "big")
    value = (key + document * 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31) < millionths * 2**64 // 10**6


@pytest.mark.parametrize("millionths", [1, 10_000, 333_333, 500_000])
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_a_document_is_held_out_by_seed_and_number_alone(seed: int, millionths: int) -> None:
    documents = np.array([0, 1, 2, 3, 1000, 2**31, 2**40 + 7, *range(10, 60)])
    wanted = [drawn(seed, int(document), millionths) for document in documents]
    assert DocumentSide(seed, millionths, held=True).keeps(documents).tolist() == wanted
    assert DocumentSide(seed, millionths, held=False).keeps(documents).tolist() == [
        not each for each in wanted
    ]
    one_by_one = [
        bool(DocumentSide(seed, millionths, held=True).keeps(documents[[at]])[0]) for at in range(57)
    ]
    assert one_by_one == wanted


@pytest.mark.parametrize("share", [0.000_1, 0.01, 0.1, 0.5])
def test_so_many_are_held_out_as_are_asked_for(share: float) -> None:
    """To within five standard deviations of as many draws, for each of some seeds."""
    number = 200_000
    for seed in range(5):
        held = int(DocumentSide(seed, round(share * 1e6), held=True).keeps(np.arange(number)).sum())
        assert abs(held - share * number) <= 5 * (number * share * (1 - share)) ** 0.5


def test_another_seed_holds_out_others_and_a_larger_share_the_same_and_more() -> None:
    documents = np.arange(10_000)
    some = DocumentSide(1, 100_000, held=True).keeps(documents)
    others = DocumentSide(2, 100_000, held=True).keeps(documents)
    both = int((some & others).sum())
    assert 50 < both < 170  # a tenth of a tenth: they have nothing to do with each other
    more = DocumentSide(1, 200_000, held=True).keeps(documents)
    assert (more | ~some).all()
    assert more.sum() > some.sum()


LENGTHS = (3, 0, 5, 1, 4, 0, 2, 7, 1, 1, 6, 2)


@pytest.mark.parametrize("at_once", [1, 2, 5, 100])
@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_of_a_side_are_those_of_its_documents(
    seed: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the blocks end in which borders are read. A document may have several sequences."""
    monkeypatch.setattr(index_module, "_AT_ONCE", at_once)
    path = tmp_path / "a.idx"
    write_index(path, np.dtype("<u2"), np.array([2, 1, *LENGTHS[1:]], np.int32), np.array([0, *range(2, 14)]))
    starts = np.cumsum([0, *LENGTHS])
    assert np.array_equal(np.unique(np.concatenate(list(read_index(path).borders()))), np.unique(starts))
    seen = []
    for held in (False, True):
        side = DocumentSide(seed, 400_000, held)
        kept = side.of_documents(read_index(path).borders())
        wanted = [
            token
            for number, (first, stop) in enumerate(itertools.pairwise(starts.tolist()))
            if drawn(seed, number, 400_000) == held
            for token in range(first, stop)
        ]
        assert len(kept) == len(wanted)
        for start, stop in (
            (0, len(wanted)),
            (1, len(wanted) - 1),
            *((at, at + 1) for at in range(len(wanted))),
        ):
            found = [range(token, token + length) for token, length in kept.stretches(start, stop)]
            assert list(itertools.chain(*found)) == wanted[start:stop]
        seen += wanted
    assert sorted(seen) == list(range(sum(LENGTHS)))


@pytest.mark.parametrize(
    ("tokens", "held"), [(1000, 10), (99, 0), (100, 1), (0, 0), (123_456_789_012, 1_234_567_890)]
)
def test_without_documents_the_end_is_held_out(tokens: int, held: int) -> None:
    trained, rest = (DocumentSide(5, 10_000, side).cut(tokens) for side in (False, True))
    assert (len(trained), len(rest)) == (tokens - held, held)
    assert [tuple(each) for each in trained.stretches(0, len(trained))] == (
        [(0, tokens - held)] if tokens else []
    )
    assert [tuple(each) for each in rest.stretches(0, held)] == ([(tokens - held, held)] if held else [])


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("on_long", ["cut", "skip"])
def test_no_piece_is_in_rows_of_both_sides(kind: str, on_long: str) -> None:
    dice = np.random.default_rng(3)
    starts = np.cumsum([0, *dice.integers(0, 40, 3000)])
    found = {}
    for held in (False, True, None):
        side = None if held is None else DocumentSide(7, 50_000, held)
        rule = PackRule(kind, 16, True, on_long, side)  # type: ignore[arg-type]
        pieces = [
            (int(token), int(length))
            for block in pack(starts, rule)
            for token, length in zip(block.tokens, block.lengths, strict=True)
        ]
        found[held] = set(pieces)
        assert len(found[held]) == len(pieces)
    assert all(drawn(7, int(np.searchsorted(starts, token, "right")) - 1, 50_000) for token, _ in found[True])
    assert found[False].isdisjoint(found[True])
    # Rows of one token alone are left out, and which they are depends on what else there is.
    assert {each for each in found[None] ^ (found[False] | found[True]) if each[1] > 1} == set()


def test_a_rule_says_the_side_and_without_one_is_named_as_ever() -> None:
    table = {"source": "jsonl", "path": "/a", "tokenizer": "/t", "sequences": "packed"}
    train = {"steps": 1, "global_batch": 1, "micro_batch": 1, "sequence": 16, "seed": 3}
    plain = parse_job({"name": "a", "train": train, "data": table})
    held = parse_job({"name": "a", "train": train, "data": table, "eval": {"held_out": 0.01}})
    assert side_of(plain) is None
    rule = PackRule("packed", 16, separate=True, on_long="cut")
    assert rule_of(plain) == rule
    assert msgspec.json.encode(rule) == b'{"kind":"packed","sequence":16,"separate":true,"on_long":"cut"}'
    assert rule_of(held) == PackRule("packed", 16, True, "cut", DocumentSide(3, 10_000, held=False))
    assert rule_of(held, held=True) == PackRule("packed", 16, True, "cut", DocumentSide(3, 10_000, held=True))
