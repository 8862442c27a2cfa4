"""One step against a plain loop of transformers and torch on the same samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.asking import asking_unequally
from tests.helpers.models import small_config, small_job
from tests.helpers.plain import assert_same, engine_step, plain_step


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_rows_that_ask_for_unequally_many(family: str, tmp_path: Path) -> None:
    config = small_config(family, initializer_range=0.1, vocab_size=257)
    spec = small_job(family, config, train={"steps": 1, "global_batch": 8}, checkpoint={"dir": str(tmp_path)})
    with asking_unequally():
        assert_same(engine_step(spec, tmp_path), plain_step(spec))
