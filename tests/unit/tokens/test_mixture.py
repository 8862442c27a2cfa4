"""Shares hold at every prefix, each row comes once a pass, and a limit is known before anything is read."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from math import gcd
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.protocol.job import Job, parse_job
from oobleckd.tokens.errors import DataError
from oobleckd.tokens.mixture import MixPeriod, Mixture, SourceLimit, mixture_of, planned

FREE = SourceLimit(None, drops=True)
weights_lists = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)


def smallest(weights: list[int]) -> tuple[int, ...]:
    return tuple(weight // gcd(*weights) for weight in weights)


@given(weights_lists)
def test_each_has_its_share_to_within_less_than_one_after_every_sample(weights: list[int]) -> None:
    period = MixPeriod(smallest(weights))
    total, seen = period.length, [0] * len(weights)
    several = sum(1 for weight in weights if weight)
    most = 1 - 1 / (2 * several - 2) if several > 1 else 0
    for number in range(2 * total):
        source, rank = period(number)
        assert rank == seen[source]
        seen[source] += 1
        for have, weight in zip(seen, period.weights, strict=True):
            assert abs(have - (number + 1) * weight / total) <= most + 1e-9
        assert period.counts(number + 1) == seen
        assert period.after(source, rank + 1) == number + 1


@settings(max_examples=60)
@given(st.data())
def test_sources_go_on_where_they_stopped_whatever_stages_and_limits_there_are(data: st.DataObject) -> None:
    many = data.draw(st.integers(1, 5))
    row = st.lists(st.integers(0, 9), min_size=many, max_size=many).filter(any).map(smallest)
    firsts = sorted(data.draw(st.sets(st.integers(1, 150), max_size=3)))
    stages = [(first, data.draw(row)) for first in (0, *firsts)]
    most = data.draw(st.lists(st.none() | st.integers(0, 80), min_size=many, max_size=many))
    end = data.draw(st.integers(1, 200))
    mixture = Mixture(stages, [SourceLimit(rows, drops=True) for rows in most], end)
    seen, last = [0] * many, end if mixture.over is None else mixture.over
    for number in range(last):
        source, rank = mixture(number)
        assert rank == seen[source]
        seen[source] += 1
        stage = max(begin for begin, _ in stages if begin <= number)
        assert dict(stages)[stage][source]
        assert mixture.counts(number + 1) == seen
    for have, rows, limit in zip(seen, most, mixture.limits, strict=True):
        assert rows is None or have <= rows
        assert limit.reached is None or have == rows
    if mixture.over is not None:
        weights = [row for begin, row in stages if begin <= mixture.over][-1]
        assert all(not weight or have == rows for weight, have, rows in zip(weights, seen, most, strict=True))


def test_where_one_has_reached_its_limit_the_others_keep_their_shares() -> None:
    mixture = Mixture([(0, (2, 1, 1))], [FREE, SourceLimit(10, drops=True), FREE], 400)
    reached = mixture.limits[1].reached
    assert reached is not None
    assert mixture.counts(reached)[1] == 10
    assert 36 <= reached <= 40
    more = [b - a for a, b in zip(mixture.counts(reached), mixture.counts(400), strict=True)]
    assert more[1] == 0
    assert abs(more[0] - 2 * more[2]) < 3


def test_the_order_of_all_devices_is_this_one() -> None:
    """What stands here is in ledgers and results of runs: another order would be another run."""
    order = Mixture([(0, (7, 2, 1)), (10, (0, 1, 3))], [FREE] * 3, 20)
    assert "".join(str(order(number)[0]) for number in range(18)) == "001002001021222122"


def job_of(text: str, **train: Any) -> Job:
    sizes = {"steps": 10, "global_batch": 4, "micro_batch": 2, "sequence": 8} | train
    table = {"name": "a", "train": sizes, "data": tomllib.loads(text)}
    return parse_job(table)


A = '[[source]]\nname = "a"\nkind = "bin"\npath = "/a"\n'
B = '[[source]]\nname = "b"\nkind = "bin"\npath = "/b"\n'


def test_steps_are_counted_from_1() -> None:
    job = job_of(
        f"{A}weight = 1\n{B}weight = 0\n[[stage]]\nfrom_step = 3\nweights = {{ b = 0.5, a = 0.5 }}\n"
    )
    mixture = mixture_of(job, [100, 100])
    assert [mixture(number)[0] for number in range(8)] == [0] * 8
    assert sorted(mixture(number)[0] for number in range(8, 12)) == [0, 0, 1, 1]


def test_stages_and_limits_count_the_samples_of_ramped_steps() -> None:
    """Of 2, 2, 2, 4, 4, … sequences: the third step begins with sample 4, the fifth with sample 10."""
    ramp = {"start": 2, "increment": 2, "samples": 6}
    text = (
        f"{A}weight = 1\n{B}weight = 0\nepochs = 1\n[[stage]]\nfrom_step = 3\nweights = {{ b = 1, a = 0 }}\n"
    )
    mixture = mixture_of(job_of(text, batch_ramp=ramp), [100, 100])
    assert [mixture(number)[0] for number in range(8)] == [0] * 4 + [1] * 4
    assert mixture.end == 3 * 2 + 7 * 4
    with pytest.raises(DataError, match=r"reaches its limit of 1 epoch in step 5 of 10"):
        mixture_of(job_of(text, batch_ramp=ramp), [100, 6])


@pytest.mark.parametrize(
    ("more", "steps", "says"),
    [
        ("epochs = 2", 10, ""),
        ("epochs = 1", 10, r"source 'b': reaches its limit of 1 epoch in step 6 of 10"),
        ("epochs = 1.5", 10, r"source 'b': reaches its limit of 1.5 epochs in step 8 of 10"),
        ("tokens = 80", 10, r"source 'b': reaches its limit of 80 tokens in step 6 of 10"),
        ("tokens = 80\nepochs = 2", 10, r"source 'b': reaches its limit of 2 epochs or 80 tokens in"),
        ("epochs = 1\nat_limit = 'drop'", 10, ""),
    ],
)
def test_a_limit_that_is_too_low_is_found_before_anything_is_read(more: str, steps: int, says: str) -> None:
    job = job_of(f"{A}weight = 1\n{B}weight = 1\n{more}\n", steps=steps)
    if not says:
        mixture_of(job, [10, 10])
        return
    with pytest.raises(DataError, match=says):
        mixture_of(job, [10, 10])
    assert planned(job, [10, 10]).limits[1].reached is not None


def test_where_all_are_dropped_the_job_is_too_long() -> None:
    limits = "epochs = 1\nat_limit = 'drop'\n"
    job = job_of(f"{A}weight = 1\n{limits}{B}weight = 3\n{limits}")
    assert mixture_of(job, [20, 20]).over is None
    with pytest.raises(DataError, match="every source has reached its limit in step 6 of 10"):
        mixture_of(job, [10, 10])


def test_a_source_without_a_row_is_named() -> None:
    with pytest.raises(DataError, match="'b': has no whole sequence of 8 tokens"):
        mixture_of(job_of(f"{A}weight = 1\n{B}weight = 3\n"), [20, 0])


def test_weights_of_many_digits_have_a_table_in_no_time() -> None:
    period = MixPeriod((876_543, 123_456, 1))
    first = [period(number)[0] for number in range(200)]
    assert first.count(0) in range(174, 177)
    starts = [number for number, source in enumerate(first) if source == 1]
    assert {b - a for a, b in pairwise(starts)} <= {7, 8, 9, 10}
