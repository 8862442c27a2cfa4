"""A bit for each token, wherever stretches begin and end."""

from __future__ import annotations

import io

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.tokens.asked import AskedTokens, AskedWriter

PARTS = st.lists(st.lists(st.booleans(), max_size=30), max_size=8)


def written(parts: list[list[bool]]) -> bytes:
    file = io.BytesIO()
    writer = AskedWriter(file)
    for part in parts:
        writer.add(np.array(part, np.bool_))
    writer.end()
    return file.getvalue()


def test_the_bytes_are_these() -> None:
    assert written([[True, False, False, True], [False] * 3 + [True], [True]]) == bytes([0b10001001, 1])
    assert written([]) == b""


@given(parts=PARTS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_however_it_is_written_any_stretch_can_be_read(parts: list[list[bool]], data: st.DataObject) -> None:
    bits = [bit for part in parts for bit in part]
    found = written(parts)
    assert found == written([bits])
    seen = []
    asked = AskedTokens(np.frombuffer(found, np.uint8), lambda start, stop: seen.append((start, stop)))
    first = data.draw(st.integers(0, len(bits)))
    stop = data.draw(st.integers(first, len(bits)))
    assert asked.mask(first, stop).tolist() == bits[first:stop]
    assert seen == [(first // 8, -(-stop // 8))]
    stretches = np.array([[0, first], [first, stop - first]])
    assert asked.counts(*stretches.T).tolist() == [sum(bits[:first]), sum(bits[first:stop])]
