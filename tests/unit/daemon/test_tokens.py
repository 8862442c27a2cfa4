"""The file of tokens: what is in it is a digest or is refused, and it is synced before it has its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from oobleckd.daemon.tokens import TokenError, find, load_tokens, make_token, tokens_path


@pytest.mark.parametrize("digest", ["", "0" * 63, "é" * 64, "g" * 64])
def test_a_digest_that_is_none_is_refused(tmp_path: Path, digest: str) -> None:
    token = make_token(tmp_path, "me", "act", 2e9)
    good = load_tokens(tmp_path)[0].digest
    path = tokens_path(tmp_path)
    path.write_text(path.read_text(encoding="utf-8").replace(good, digest), encoding="utf-8")
    with pytest.raises(TokenError, match="is no token"):
        load_tokens(tmp_path)
    make_again = tmp_path / "again"
    assert find(load_tokens(make_again), token) is None
