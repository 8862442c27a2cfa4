"""Documents, a tokenizer and folders for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.corpora import make_tokenizer, write_corpora


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Path]]:
    return write_corpora(tmp_path_factory.mktemp("corpora") / "all")
