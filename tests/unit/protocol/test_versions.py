"""Which version two programs speak with each other."""

import pytest

from oobleckd.protocol import versions
from oobleckd.protocol.messages import PROTOCOL
from oobleckd.protocol.versions import spoken, words


@pytest.mark.parametrize(
    ("ours", "theirs", "both"),
    [
        ((3, 5), (3, 5), 5),
        ((3, 5), (4, 8), 5),
        ((3, 5), (1, 4), 4),
        ((3, 5), (6, 8), None),
        ((3, 5), (1, 2), None),
        ((5, 5), (0, 5), 5),
        ((5, 5), (0, 6), None),
        ((3, 5), (0, 4), 4),
    ],
)
def test_the_newest_that_both_speak(monkeypatch: pytest.MonkeyPatch, ours, theirs, both) -> None:
    monkeypatch.setattr(versions, "OLDEST", ours[0])
    monkeypatch.setattr(versions, "PROTOCOL", ours[1])
    assert spoken(theirs[1], theirs[0]) == both


def test_words() -> None:
    assert words(7, 0) == words(7, 7) == "7"
    assert words(7, 5) == "5 to 7"
    assert spoken(PROTOCOL, 0) == PROTOCOL
