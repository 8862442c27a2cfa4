"""What stays is not looked at for garbage again and again."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from oobleckd.host import heap


@pytest.fixture
def _as_before() -> Iterator[None]:
    before = list(gc.callbacks)
    yield
    gc.callbacks[:] = before
    gc.unfreeze()


@pytest.mark.usefixtures("_as_before")
def test_a_look_for_garbage_that_takes_long_is_the_last_at_what_survives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heap.keep_looks_short()
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    kept = [[number] for number in range(50_000)]
    monkeypatch.setattr(heap, "LOOK_S", 1e9)
    gc.collect()
    assert gc.get_freeze_count() <= frozen
    monkeypatch.setattr(heap, "LOOK_S", 0.0)
    gc.collect(1)
    assert gc.get_freeze_count() <= frozen, "not all was looked at"
    gc.collect()
    assert gc.get_freeze_count() > frozen + len(kept) // 2
