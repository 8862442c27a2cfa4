"""A job on several sources: its samples are a function of seed, step and micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from oobleckd.protocol.inputs import difference, same
from oobleckd.protocol.job import Job
from oobleckd.worker.data.corpus import Corpus, open_corpus
from oobleckd.worker.data.input_watch import Eyes
from oobleckd.worker.data.look import look_at
from oobleckd.worker.runtime.errors import UserError
from oobleckd.worker.tools.samples import samples
from tests.helpers.models import GPT2, small_job
from tests.helpers.prepared import prepared

Made = Callable[..., Job]
ROWS = {"web": 40, "code": 12, "wiki": 5}
FIRST = {"web": 0, "code": 100, "wiki": 200}
"""Row r of a source has its first number plus r in all places."""
WEIGHTS = {"web": 0.5, "code": 0.375, "wiki": 0.125}
STEPS = 12


@pytest.fixture
def mixed(tmp_path: Path) -> Made:
    """A job of 12 steps of 8 rows of 8 tokens: a prepared source, a plain file, and an array."""
    values = {name: np.repeat(np.arange(rows) + FIRST[name], 8).astype("<u2") for name, rows in ROWS.items()}
    prepared(tmp_path / ("1" * 32), [values["web"][:100], values["web"][100:]], "uint16")
    values["code"].tofile(tmp_path / "code.bin")
    np.save(tmp_path / "wiki.npy", values["wiki"])

    def made(order: tuple[str, ...] = ("web", "code", "wiki"), seed: int = 0, **more: Any) -> Job:
        where = {
            "web": {"kind": "jsonl", "path": "/none", "prepared": str(tmp_path / ("1" * 32))},
            "code": {"kind": "bin", "path": str(tmp_path / "code.bin")},
            "wiki": {"kind": "npy", "path": str(tmp_path / "wiki.npy")},
        }
        tables = [
            {"name": name, "weight": WEIGHTS[name], **where[name], **more.get(name, {})} for name in order
        ]
        stages = {"stage": [{"from_step": 7, "weights": {"web": 1, "wiki": 1}}]} if "wiki" in order else {}
        return small_job(
            "gpt2",
            {**GPT2, "vocab_size": 300},
            data={"source": tables, "tokenizer": "/none", **stages},
            train={"steps": STEPS, "global_batch": 8, "micro_batch": 4, "seed": seed},
        )

    return made


def all_rows(corpus: Corpus, steps: range = range(STEPS)) -> list[int]:
    """The number in each row, in the order of the job."""
    return [int(row[0]) for step in steps for half in (0, 1) for row in corpus.tokens(step, half)]


def of(name: str, rows: list[int]) -> list[int]:
    return [row - FIRST[name] for row in rows if FIRST[name] <= row < FIRST[name] + 100]


def test_shares_change_with_the_stage_and_each_row_comes_once_a_pass(mixed: Made) -> None:
    corpus = open_corpus(mixed())
    rows = all_rows(corpus)
    assert [len(of(name, rows[:48])) for name in ROWS] == [24, 18, 6]
    assert [len(of(name, rows[48:])) for name in ROWS] == [24, 0, 24]
    for name, many in ROWS.items():
        drawn = of(name, rows)
        for begin in range(0, len(drawn), many):
            whole = Counter(drawn[begin : begin + many])
            assert set(whole.values()) == {1}
            assert len(whole) == many or begin + many > len(drawn)
    ids = [sample for step in range(STEPS) for half in corpus.of_step(step) for sample in half]
    assert len(set(ids)) == len(ids)


def test_a_micro_batch_is_a_function_of_seed_and_step(mixed: Made) -> None:
    first, again = open_corpus(mixed()), open_corpus(mixed())
    wanted = [first.tokens(step, half) for step in range(STEPS) for half in (0, 1)]
    for step in reversed(range(STEPS)):
        assert torch.equal(again.tokens(step, 1), wanted[2 * step + 1])
    again.of_step(STEPS)  # which is drawn ahead, and never read
    assert all_rows(open_corpus(mixed(seed=1))) != all_rows(first)


def test_a_source_more_or_in_another_place_leaves_the_others_their_order(mixed: Made) -> None:
    rows = all_rows(open_corpus(mixed()))
    other = all_rows(open_corpus(mixed(("code", "wiki", "web"))))
    fewer = all_rows(open_corpus(mixed(("code", "web"))))
    for name in ("web", "code"):
        many = min(len(of(name, rows)), len(of(name, fewer)))
        assert of(name, rows)[:many] == of(name, fewer)[:many]
        assert of(name, rows) == of(name, other)


def test_samples_are_shown_with_their_source(mixed: Made) -> None:
    told = samples(mixed(), 7, 0)
    corpus = open_corpus(mixed())
    assert [row.tokens for row in told.rows] == [tuple(row) for row in corpus.tokens(6, 0).tolist()]
    for row in told.rows:
        assert row.start == 8 * (row.tokens[0] - FIRST[row.source])
        assert bool(row.borders) == (row.source == "web")


def test_what_is_wrong_is_said_of_the_source(mixed: Made, tmp_path: Path) -> None:
    limit = {"code": {"epochs": 1}}
    with pytest.raises(UserError, match=r"data.source 'code': reaches its limit of 1 epoch in step 5 of 12"):
        open_corpus(mixed(**limit))
    with pytest.raises(UserError, match=r"data.source 'code': reaches"):
        look_at(mixed(**limit), 300)
    assert look_at(mixed(code={"epochs": 1, "at_limit": "drop"}), 300) == ()
    with pytest.raises(UserError, match=r"data.source 'wiki': .*wiki.npy has token 204, but the model"):
        open_corpus(
            msgspec.structs.replace(mixed(), model=small_job("gpt2", {**GPT2, "vocab_size": 150}).model)
        )
    np.zeros(5, "<u2").tofile(tmp_path / "code.bin")
    with pytest.raises(UserError, match=r"data.source 'code': .*has 5 tokens, fewer than train.sequence"):
        open_corpus(mixed())
    with pytest.raises(UserError, match=r"data.source 'web': prepared: /gone is not seen on this machine"):
        open_corpus(mixed(web={"prepared": "/gone"}))


def test_its_text_is_known_by_all_sources(mixed: Made, tmp_path: Path) -> None:
    corpus = open_corpus(mixed())
    part = corpus.inputs.part
    assert (part.files, part.num_bytes) == (3, sum(corpus.inputs.sizes))
    assert corpus.digest == part.whole == corpus.inputs.digest()
    assert set(part.listing) == {"web/tokens.bin", "code/code.bin", "wiki/wiki.npy"}
    assert Eyes(corpus.inputs).verify() is None
    copy = (tmp_path / "code.bin").read_bytes()
    (tmp_path / "code.bin").unlink()
    (tmp_path / "code.bin").write_bytes(copy)
    eyes = Eyes(corpus.inputs)
    for _ in range(2):
        assert eyes.look() is None  # another file with the same bytes
        assert eyes.verify() is None
    other = bytearray(copy)
    other[2] ^= 1
    (tmp_path / "code.bin").write_bytes(other)
    changed = open_corpus(mixed()).inputs.part
    assert not same(part, changed)
    assert "code/code.bin changed" in difference((part,), (changed,))
    moved = eyes.look()
    assert moved is not None
    assert moved.now == "other"


def test_what_is_written_in_place_is_found(mixed: Made, tmp_path: Path) -> None:
    corpus = open_corpus(mixed())
    with (tmp_path / "wiki.npy").open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"\x01")
    assert Eyes(corpus.inputs).verify() is not None
