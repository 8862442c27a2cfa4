"""Writes docs/console.md: ``python -m oobleckd.console.docs [FILE]``. Keys, screens and options come from the
code.

Owns the page's words around them. A test compares the page with what this would write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from oobleckd.console import keys
from oobleckd.console.app import main as command
from oobleckd.console.commands import WORDS
from oobleckd.console.keys import Key, ScreenName
from oobleckd.console.screens.help import LINKS, SIGNS

# The scene and size in which a screen's picture was taken (tests/unit/console/shots.py).
SEEN: dict[ScreenName, str] = {
    "overview": "failing-160x46", "nodes": "fleet-160x46", "pipelines": "failing-160x46", "templates": "recovered-120x36",
    "incidents": "recovered-160x46", "job": "recovered-120x36", "events": "recovered-120x36", "whatif": "recovered-120x36",
    "jobs": "calm-120x36",
}  # fmt: skip
_HEAD = """\
# oobleck-console

Generated from `console/keys.py` and `console/docs.py` by `make docs`; do not edit.

The screen that operators keep open: `oobleck-console`. It finds the daemon as `oobleckctl` does (`--socket PATH`, else `OOBLECK_SOCKET`, else
the local cluster's, else the service's), and needs nothing but the socket. It shows in a second whether training is safe, what a failure
did, and what the next one would do. [More pictures](images/README.md): every screen in three sizes, calm, while a node fails, after it,
with fewer nodes, waiting, without the daemon, of the past. `make pictures` draws them.
"""

_STATES = """\
## Bad days
![The daemon is away](images/console-overview-stale-120x36.png)

- **The daemon is away** (`◌ STALE 12 s`): *training does not need it*: a job that was running goes on, unless its nodes were stopped as well. The last
  state stays, greyed, with its age; the console tries again for ever. A daemon that comes back with another history (a new state folder) begins a new
  picture, even where its job has the same name.
- **The daemon is of another version**: what it does not answer, or answers in words that this console does not know, is said in the panel that asked,
  and of a list in the banner as well; the rest works. The same holds for one answer that takes too long.
- **The daemon is not there yet**, and `--at` asks for its past: that is shown as soon as it is there.
- **A file that cannot be shown** (cut off, of another format, no incident at all) is one line and exit code 1.
- **A small terminal**: there are layouts for at least 140 x 40, 100 x 30 and 56 x 16 cells. A smaller one shows only the most important panel.

Colour never says anything alone: every state has its sign or its word. `NO_COLOR` takes all colours away, `--ascii` the signs; the theme
`colour-blind` uses the colours of Okabe and Ito.

## Jobs, curves, devices, logs
`9` lists all jobs: those at work, the queue in its order, those that have ended. `enter` shows one of them on every screen (so do `:job NAME` and
the palette, `^p`), `a` whichever is at work. Nodes are of no job; layers, plans, schedules, incidents, curves and goodput are of the one that is shown.
Curves (Job, Jobs, Overview) are of the whole run from its first step on. Their columns grow with their place, so that the beginning of a run is seen as
well as its end; a line is the mean of a column's steps, the shade what lies between the least and the most of them.
Nodes shows what devices and cards say of themselves: memory used, planned and there is, utilisation, temperature, power, clocks and what holds
them down, errors. What no node tells has no column. `l` shows the newest lines that the node under the cursor wrote.
Incidents and Events show, from 100 x 30 cells on, what else happened to the incident and its nodes, or to what the event under the cursor is
about: its story, as `oobleckctl story` has it.

## The past
`oobleck-console --at 12:04` begins at a time of the daemon's history and plays; `t` asks for a time at any time, `enter` on an event or an
incident goes to its moment. A time of day is the one nearest to what is shown; the date is said where it is not today's. `,` and `.` go a second back or on, `<` and `>` half a minute, `space` plays and stops, `esc` comes back to now. On
Overview and Pipelines `←` and `→` go to the moments of steps whose op times were kept: one each half minute, and every repaired one. What
happens meanwhile is not lost. `e` on an incident writes it to a file with the ten seconds before and after it, and `oobleck-console --bundle FILE` shows that
file on the same screens, on any machine, without a daemon. A file of that name that is there stays: a number is appended.

## Acts
Every act shows its `oobleckctl` command and what the daemon says would follow, and is done after `enter`. Where it stops the job or takes it back
to a checkpoint, or where the daemon does not know, the job's name has to be typed. `--read-only` refuses all of them; `ctrl+y` copies the
command instead. In the past nothing can be done. An act on several nodes is tried on each of them, and of each it is said what came of it; where no
answer came, it may have been done, and that is said. While the picture is frozen, what would follow is of now all the same. Commands name the
daemon (`--socket`) where the console was started so.

## In scripts and browsers
`oobleck-console --once` prints the overview as plain text and ends: 0, or 4 where no daemon can be reached; with `--at` or `--bundle` that of
the past. Without a terminal and without `--once` it is exit code 2. For data that a program reads, use `oobleckctl get … -o json`.
`oobleck-console --web` serves the same screens to browsers of this machine (`pip install '.[web]'` in a checkout), always read-only, and `e` writes no file: whoever
reaches a port is not known, as whoever opens the daemon's socket is. Pages of other sites are refused.

![In a browser](images/console-web.png)

## How it is made
`feed` (two threads: the event stream, and answers of the API) tells **facts**; so does `replay`, of the daemon's history or of a file.
`model.fold` adds them up to one frozen `View`, pure and without a clock; **painters** in `widgets/` turn a view and what one looks at into lines,
pure as well, and only those that are in sight; `tui` folds and paints a few times a second. `widgets/panel` is the only widget (Line API), `themes`
the only place that knows colours, `screens/places` says what lies where, `keys` knows every key. A step is in its event whole and
fetches nothing; what another event touches is fetched at once (of more than 250 nodes at most every second for each thousand), the rest every
2 to 60 s, and what only one screen shows only while that one is in sight. Of events the newest 4,000 are kept, and of each level 1,000 whatever the
others have to say (`kept`).

What every screen looks like is in `tests/unit/console/snapshots`, cell by cell; `make snapshots` writes it anew.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_options(), *_screens(), *_everywhere(), _STATES])


def _options() -> Iterator[str]:
    yield "## Options"
    yield "| Option | Meaning |"
    yield "|---|---|"
    context = click.Context(command, info_name="oobleck-console")
    for option in command.params:
        record = option.get_help_record(context)
        if record is not None:
            yield f"| `{_cell(record[0])}` | {_cell(record[1])} |"
    yield ""


def _screens() -> Iterator[str]:
    yield "## Screens"
    for number, name in enumerate(keys.SCREENS, 1):
        yield f"### `{number}` {keys.TITLES[name]}"
        yield f"{keys.SUBJECTS[name][0].upper()}{keys.SUBJECTS[name][1:]}.\n"
        yield f"![{keys.TITLES[name]}](images/console-{name}-{SEEN[name]}.png)\n"
        yield from _table((*keys.of(name), *(keys.of("list") if name in keys.LISTS else ())))
        if signs := SIGNS.get(name):
            yield "Signs: " + "; ".join(f"`{sign}` {what}" for sign, what in signs) + ".\n"


def _everywhere() -> Iterator[str]:
    yield "## Everywhere"
    yield from _table(keys.of("everywhere"))
    yield "In the log of a node (`l` on Nodes):\n"
    yield from _table(keys.of("log"))
    yield "In whatever asks for something:\n"
    yield from _table(keys.of("prompt"))
    yield "After `:` a screen's name, its beginning or its number, or: "
    yield "; ".join(f"`{word}` {what}" for word, what in WORDS.items()) + ".\n"
    yield "The first word of the screen: " + "; ".join(f"`{sign}` {what}" for sign, what in LINKS) + ".\n"


def _table(found: Iterable[Key]) -> Iterator[str]:
    yield "| Key | Does | The same as |"
    yield "|---|---|---|"
    for key in found:
        names = " ".join(f"`{_cell(keys.shown(name))}`" for name in key.keys)
        yield f"| {names} | {_cell(key.help)} | {f'`{_cell(key.command)}`' if key.command else ''} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page to the file named, or to docs/console.md of the current folder."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/console.md")
    target.write_text(page(), encoding="utf-8")
    print(target)


if __name__ == "__main__":
    main()
