"""Text of others: which characters are escaped, and that nothing else is changed."""

import json
import unicodedata

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleckd.protocol import codec
from oobleckd.protocol.messages import DeviceFailed
from oobleckd.protocol.text import all_visible, json_visible, of_ours, shown_json, visible

OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
ANY_TEXT = st.text(st.characters(exclude_categories=()))


def test_every_character_that_a_terminal_obeys_or_draws_as_nothing_is_escaped() -> None:
    """Control, format and separator characters, surrogates, and what Unicode lets a font ignore."""
    kept = [chr(n) for n in range(0x110000) if visible(chr(n)) == chr(n)]
    assert not [char for char in kept if unicodedata.category(char) in OBEYED]
    for ignored in "\u034f\u115f\u1160\u17b4\u180b\u3164\ufe0f\uffa0\U000e0100":
        assert visible(ignored) != ignored


@settings(deadline=None, max_examples=60)
@given(ANY_TEXT)
def test_visible_text_is_of_one_line_encodes_and_stays_as_it_is(text: str) -> None:
    """Escaping twice is escaping once; what was harmless is unchanged."""
    seen = visible(text)
    assert not any(unicodedata.category(char) in OBEYED for char in seen)
    assert seen.encode().decode() == seen
    assert visible(seen) == seen
    assert len(seen.splitlines()) <= 1


def test_letters_of_all_languages_and_pictures_stay() -> None:
    """Only what nobody sees is written as an escape."""
    for text in ("Zoë", "節点 7", "узел", "עברית", "😀 ok", r"C:\x1b already"):
        assert visible(text) == text


def test_escapes_are_those_of_python() -> None:
    """So a reader knows what was there."""
    assert visible("\x1b[2J\r\n\t\x9b\u202e\ud800\U000e0041") == r"\x1b[2J\r\n\t\x9b\u202e\ud800\U000e0041"


def test_own_line_breaks_and_colours_stay_in_a_page() -> None:
    """And nothing else: neither a title nor a cursor that moves."""
    assert (
        of_ours("\x1b[31mred\x1b[0m\n\ta\x1b]0;t\x07\x1b[2J\r") == "\x1b[31mred\x1b[0m\n\ta"
        r"\x1b]0;t\x07\x1b[2J\r"
    )


class Inner(msgspec.Struct, frozen=True):
    """Something with a text."""

    name: str
    number: int = 1


class Outer(msgspec.Struct, frozen=True):
    """Something that is made of such."""

    inner: Inner
    many: tuple[Inner, ...] = ()
    table: dict[str, list[str]] = {}


def test_structs_are_made_visible_however_deep() -> None:
    """And are themselves where nothing is to be changed."""
    fine = Outer(Inner("a"), (Inner("b"),), {"k": ["v"]})
    assert all_visible(fine) is fine
    bad = Outer(Inner("a\n"), (Inner("b"), Inner("\x1b")), {"k\r": ["v\u202e"]})
    assert all_visible(bad) == Outer(Inner(r"a\n"), (Inner("b"), Inner(r"\x1b")), {r"k\r": [r"v\u202e"]})


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_json_means_the_same_and_a_terminal_obeys_none_of_it(text: str) -> None:
    """Of whatever has to be kept to the letter, such as a path."""
    data = shown_json(msgspec.json.encode({"a": text}))
    assert json.loads(data) == {"a": text}
    assert visible(data.decode()) == data.decode()
    assert json.loads(json_visible(msgspec.json.encode(text))) == visible(text)


def test_a_message_with_a_name_that_is_no_text_is_sent() -> None:
    """Names of files need not be UTF-8; Python has surrogates for them, which nothing can encode."""
    data = codec.encode(DeviceFailed("node-1/0", "job-1", "no file \udcff", "look"))
    message = codec.decode_from_worker(data)
    assert isinstance(message, DeviceFailed)
    assert message.error == r"no file \udcff"
