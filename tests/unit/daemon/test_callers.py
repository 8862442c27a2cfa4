"""Tokens, limits and the document of the API."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from oobleckd.daemon import openapi, tokens
from oobleckd.daemon.http import Api
from oobleckd.daemon.limits import Limit
from oobleckd.daemon.tokens import TokenError


def test_a_limit_allows_a_burst_and_then_a_rate() -> None:
    limit = Limit(per_s=2.0, burst=3.0)
    assert [limit.take("a", 10.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert limit.take("a", 10.0) == 0.5
    assert limit.take("b", 10.0) == 0.0, "everybody has their own"
    assert limit.take("a", 10.5) == 0.0
    assert limit.take("a", 10.5) == 0.5
    assert [limit.take("a", 100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5], (
        "no more than a burst is saved up"
    )


def test_a_limit_forgets_whoever_was_quiet_for_longest() -> None:
    limit = Limit(per_s=1.0, burst=1.0)
    for number in range(10_000):
        limit.take(f"stranger {number}", float(number))
    assert len(limit._left) <= 4096


def test_tokens_are_found_by_what_they_are(tmp_path: Path) -> None:
    one = tokens.make_token(tmp_path, "one", "read", 100.0)
    two = tokens.make_token(tmp_path, "two", "act", 200.0)
    known = tokens.load_tokens(tmp_path)
    assert [each.name for each in known] == ["one", "two"]
    found = tokens.find(known, two)
    assert found is not None
    assert (found.name, found.role, found.expires_at) == ("two", "act", 200.0)
    assert tokens.find(known, one + "x") is None
    assert tokens.find(known, "") is None
    new = tokens.make_token(tmp_path, "one", "act", 300.0)
    known = tokens.load_tokens(tmp_path)
    assert tokens.find(known, one) is None
    assert tokens.find(known, new) is not None
    tokens.drop_token(tmp_path, "one")
    assert [each.name for each in tokens.load_tokens(tmp_path)] == ["two"]


def test_what_is_no_token_file_says_so(tmp_path: Path) -> None:
    assert tokens.load_tokens(tmp_path) == ()
    for text in (
        "[x]\n",
        "x = 1\n",
        "not toml",
        '[x]\nsha256 = "00"\nrole = "act"\nexpires = 2030-01-01T00:00:00Z\n',
    ):
        tokens.tokens_path(tmp_path).write_text(text)
        with pytest.raises(TokenError) as caught:
            tokens.load_tokens(tmp_path)
        assert caught.value.hint
    with pytest.raises(TokenError, match="no name"):
        tokens.make_token(tmp_path, "../x", "read", 1.0)
    tokens.tokens_path(tmp_path).unlink()
    with pytest.raises(TokenError, match="no token is called"):
        tokens.drop_token(tmp_path, "x")


def test_the_document_has_every_route_and_no_other() -> None:
    served = set()
    for route in Api(None).application().router.routes():  # type: ignore[arg-type]
        path = route.resource.canonical  # type: ignore[union-attr]
        served |= {(route.method.lower(), path)} if route.method != "HEAD" else set()
    described = {(op.method, op.path) for op in openapi.OPERATIONS}
    acts = {"pause", "resume", "cancel", "checkpoint"}
    spread = {("post", f"/v1/jobs/{{job}}/{act}") for act in acts} | {
        ("post", f"/v1/nodes/{{node}}/{act}") for act in ("drain", "undrain")
    }
    assert described - spread == {(method, path) for method, path in served if "{act}" not in path}
    assert spread <= described


def test_the_document_refers_to_nothing_that_is_not_there() -> None:
    whole = msgspec.json.decode(openapi.document())
    schemas = whole["components"]["schemas"]

    def check(value: object) -> None:
        if isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                assert reference.removeprefix("#/components/schemas/") in schemas, reference
            for each in value.values():
                check(each)
        elif isinstance(value, list):
            for each in value:
                check(each)

    check(whole)
    assert whole["openapi"] == "3.1.0"
    ids = [op["operationId"] for path in whole["paths"].values() for op in path.values()]
    assert len(ids) == len(set(ids))
