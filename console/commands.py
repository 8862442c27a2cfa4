"""What may be said after ``:``: screens by name, and a few words. Pure."""

from __future__ import annotations

from difflib import get_close_matches

import msgspec

from oobleckd.console.keys import SCREENS, TITLES, ScreenName

WORDS: dict[str, str] = {
    "q": "quit", "quit": "quit", "help": "what the keys do", "theme": "`:theme light`, dark or colour-blind",
    "at": "`:at 12:04` shows that moment, `:at now` comes back", "filter": "`:filter WORDS`, as `/` does",
    "job": "`:job NAME` shows that job on every screen; `:job` is the screen",
}  # fmt: skip


class Goto(msgspec.Struct, frozen=True):
    """Go to a screen."""

    screen: ScreenName


class Say(msgspec.Struct, frozen=True):
    """One of ``WORDS``, and what followed it."""

    word: str
    rest: str


def parse(text: str) -> Goto | Say:
    """What ``text`` asks for; a beginning that fits one screen alone is enough. Raises ValueError with one
    sentence.
    """
    word, _, rest = text.strip().partition(" ")
    word = word.casefold()
    if word in WORDS and (rest.strip() or word not in SCREENS):
        return Say(word, rest.strip())
    names: dict[str, ScreenName] = {name: name for name in SCREENS} | {
        TITLES[name].casefold(): name for name in SCREENS
    }
    names |= {str(number): name for number, name in enumerate(SCREENS, 1)}
    fitting = {names[name] for name in names if word and name.startswith(word)}
    if word in names:
        return Goto(names[word])
    if len(fitting) == 1:
        return Goto(fitting.pop())
    raise ValueError(_unknown(word, [*names, *WORDS]))


def _unknown(word: str, known: list[str]) -> str:
    close = get_close_matches(word, known, n=1)
    hint = f"did you mean :{close[0]}?" if close else "there are " + ", ".join(f":{name}" for name in SCREENS)
    return f"there is no :{word}; {hint}"
