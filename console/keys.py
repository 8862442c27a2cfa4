"""Every key of the console, in one place: where it works, what it does, and the same act as an oobleckctl
command.

Pure. The bindings of the screens, the footer, ``?`` and docs/console.md are made from it, so that none of
them can know a key that another does not. Does not know what an action's code is (``screens``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import msgspec

ScreenName = Literal[
    "overview", "nodes", "pipelines", "templates", "incidents", "job", "events", "whatif", "jobs"
]
Scope = Literal["everywhere", "list", "overview", "nodes", "pipelines", "templates", "incidents", "job",
    "events", "whatif", "jobs", "log", "prompt"]  # fmt: skip

SCREENS: tuple[ScreenName, ...] = get_args(ScreenName)
TITLES: dict[ScreenName, str] = {
    "overview": "Overview", "nodes": "Nodes", "pipelines": "Pipelines", "templates": "Templates",
    "incidents": "Incidents", "job": "Job", "events": "Events", "whatif": "What-if",
    "jobs": "Jobs",
}  # fmt: skip
SUBJECTS: dict[ScreenName, str] = {
    "overview": "the job, its nodes, its pipelines and its last incident in one picture",
    "nodes": "every node, by rack or pipeline, its devices, and how many live copies each layer has",
    "pipelines": "who computes what when in one step: measured, modelled, and where they differ",
    "templates": "the templates of the job, and which numbers of nodes they cover",
    "incidents": "every recovery by phase, what it cost, what was chosen and what was not",
    "job": "progress, curves of the whole run, how long steps take, and where the time of the devices went",
    "events": "what happened, in order, with filters and a return to each moment",
    "whatif": "what would follow if marked nodes died, and failure injection",
    "jobs": "all jobs with their progress and place in the queue; enter shows another one on every screen",
}
# Screens whose panels are lists that a cursor moves through.
LISTS: frozenset[ScreenName] = frozenset(
    {"nodes", "pipelines", "templates", "incidents", "events", "whatif", "jobs"}
)
# Screens with rows that a filter leaves out.
FILTERED: frozenset[ScreenName] = LISTS - {"pipelines"}
WITH_FILTER = ", ".join(TITLES[name] for name in SCREENS if name in FILTERED)
MAX_IN_FOOTER = 9


# A key that only a screen knows is a key that nobody finds; and Textual's own footer would need each key
# twice. (D-console-002)
class Key(msgspec.Struct, frozen=True):
    """What ``keys`` (by Textual's names) do in a ``scope``.

    ``action``: method ``action_…`` of the screen, or of the application where it begins with ``app.``.
    ``label``: for the footer, ``rank`` says in which order (0: not there). ``command``: the same as an
    oobleckctl command, for what acts on the cluster.
    """

    scope: Scope
    keys: tuple[str, ...]
    action: str
    label: str
    help: str
    rank: int = 0
    command: str = ""

    @property
    def shown(self) -> str:
        """The keys as people read them."""
        return " ".join(dict.fromkeys(map(shown, self.keys)))


_SIGNS = {
    "question_mark": "?", "slash": "/", "colon": ":", "comma": ",", "full_stop": ".", "less_than_sign": "<",
    "greater_than_sign": ">", "left_square_bracket": "[", "right_square_bracket": "]", "left": "←",
    "right": "→", "up": "↑", "down": "↓", "pageup": "PgUp", "pagedown": "PgDn", "home": "Home", "end": "End",
    "escape": "esc", "ctrl+p": "^p", "shift+tab": "⇧tab",
}  # fmt: skip


def shown(key: str) -> str:
    """One of Textual's names as people read it: ``"question_mark"`` is ``"?"``."""
    return _SIGNS.get(key, key)


def _everywhere() -> Iterator[Key]:
    for number, name in enumerate(SCREENS, 1):
        yield Key(
            "everywhere",
            (str(number),),
            f"app.goto('{name}')",
            TITLES[name],
            f"{TITLES[name]}: {SUBJECTS[name]}",
        )
    yield Key(
        "everywhere",
        ("question_mark",),
        "app.help",
        "Help",
        "what the keys here do and what the signs mean",
        1,
    )
    yield Key(
        "everywhere",
        ("colon",),
        "app.command",
        "Go",
        "go to a screen by its name, or say a command: `:nodes`, `:job NAME`, `:theme light`, `:q`",
        3,
    )
    yield Key(
        "everywhere",
        ("ctrl+p",),
        "app.command_palette",
        "Palette",
        "find any screen, key or job by a part of its words",
    )
    yield Key(
        "everywhere",
        ("escape",),
        "app.back",
        "Back",
        "back: from the past to now, else drop the filter, else the screen before",
    )
    yield Key(
        "everywhere",
        ("slash",),
        "app.filter",
        "Filter",
        f"show what has all of these words; nothing shows all again (on {WITH_FILTER})",
        4,
    )
    yield Key(
        "everywhere",
        ("space",),
        "app.freeze",
        "Freeze",
        "freeze the picture, and let it go on; in the past: play, and stop",
        5,
    )
    yield Key(
        "everywhere",
        ("t",),
        "app.time",
        "Time",
        "show a moment of the past (`12:04`, `-5m`); `now` comes back",
        6,
    )
    yield Key(
        "everywhere", ("comma", "full_stop"), "app.seek({by})", "", "in the past: a second back, a second on"
    )
    yield Key(
        "everywhere",
        ("less_than_sign", "greater_than_sign"),
        "app.seek({by})",
        "",
        "in the past: half a minute back, half a minute on",
    )
    yield Key(
        "everywhere",
        ("y",),
        "app.copy",
        "Copy",
        "copy what is shown, or what the next key would do, as an oobleckctl command",
        8,
    )
    yield Key("everywhere", ("q",), "app.quit", "Quit", "quit; training knows nothing of it", 9)


def _lists() -> Iterator[Key]:
    yield Key("list", ("up", "k", "down", "j"), "move({by})", "", "one row up, one row down")
    yield Key("list", ("pageup", "pagedown"), "move({by})", "", "ten rows up, ten rows down")
    yield Key("list", ("home", "end"), "move({by})", "", "to the first row, to the last one")


def _screens() -> Iterator[Key]:
    yield Key(
        "overview", ("tab", "shift+tab"), "mark({by})", "Panel", "mark the next panel, the one before", 2
    )
    yield Key("overview", ("enter",), "open", "Open", "open the screen of the marked panel")
    yield Key(
        "overview",
        ("left_square_bracket", "right_square_bracket"),
        "incident({by})",
        "",
        "the incident before, the next one",
    )
    yield Key(
        "overview", ("left", "right"), "scrub({by})", "", "the step before, the next one with known op times"
    )

    yield Key("nodes", ("g",), "group", "Group", "group the grid by rack, by pipeline, or not at all", 2)
    yield Key(
        "nodes",
        ("s",),
        "sort",
        "Sort",
        "sort the table by name, by state (worst first), by age of the last heartbeat",
    )
    yield Key(
        "nodes", ("m",), "mark", "Mark", "mark the node for the what-if screen, or take the mark back", 7
    )
    yield Key(
        "nodes",
        ("d",),
        "drain",
        "Drain",
        "take the node out at a step's boundary",
        command="oobleckctl drain NODE",
    )
    yield Key(
        "nodes",
        ("u",),
        "undrain",
        "Undrain",
        "let a drained node be used again",
        command="oobleckctl undrain NODE",
    )

    yield Key(
        "nodes",
        ("l",),
        "log",
        "Log",
        "show what the node wrote last, and follow it",
        8,
        "oobleckctl logs NODE",
    )

    yield Key("pipelines", ("m",), "mode", "Mode", "measured, modelled, and the difference of both", 2)
    yield Key(
        "pipelines",
        ("left", "right"),
        "scrub({by})",
        "Step",
        "the step before, the next one with known op times; after the newest it follows",
        7,
    )
    yield Key(
        "pipelines",
        ("s",),
        "sort",
        "Sort",
        "pipelines by number, those with the most waiting first, or those that a loss touches",
    )

    yield Key("templates", ("s",), "sort", "Sort", "templates by size, or those in use first", 2)

    yield Key(
        "incidents",
        ("e",),
        "export",
        "Export",
        "write the incident with all around it to a file that `oobleck-console --bundle FILE` opens",
        2,
        "oobleckctl export-incident INCIDENT -o FILE",
    )
    yield Key(
        "incidents", ("enter",), "visit", "Visit", "show everything as it was when the incident began", 7
    )

    yield Key(
        "job",
        ("p",),
        "pause",
        "Pause",
        "pause the job at the next boundary, or let it go on",
        2,
        "oobleckctl pause JOB",
    )
    yield Key(
        "job",
        ("c",),
        "checkpoint",
        "Checkpoint",
        "write a checkpoint at the next boundary",
        7,
        "oobleckctl checkpoint JOB",
    )
    yield Key(
        "job", ("X",), "cancel", "Cancel", "end the job; asks for its name", command="oobleckctl cancel JOB"
    )

    yield Key("events", ("f",), "follow", "Follow", "stay with the newest event, or stop there", 2)
    yield Key("events", ("l",), "level", "Level", "all events, warnings and errors, errors alone")
    yield Key("events", ("enter",), "visit", "Visit", "show everything as it was at the time of the event", 7)

    yield Key("whatif", ("m", "enter"), "mark", "Mark", "mark the node, or take the mark back", 2)
    yield Key("whatif", ("c",), "clear", "Clear", "take all marks back")
    yield Key("whatif", ("h",), "how", "How", "choose how the marked nodes would die")
    yield Key(
        "whatif",
        ("i",),
        "inject",
        "Inject",
        "let the marked nodes die, after a look at what follows; asks for the job's name where that stops it "
        "or takes it back",
        7,
        "oobleckctl kill-node NODE… --how HOW",
    )

    yield Key(
        "jobs", ("enter",), "choose", "Show", "show this job on every screen, until another is chosen", 2
    )
    yield Key("jobs", ("a",), "automatic", "Auto", "show whichever job is at work", 7)

    yield Key("log", ("f",), "follow", "Follow", "stay with the newest line, or stop there")
    yield Key("log", ("up", "k", "down", "j"), "move({by})", "", "one line up, one line down")
    yield Key("log", ("pageup", "pagedown"), "move({by})", "", "ten lines up, ten lines down")
    yield Key("log", ("home", "end"), "move({by})", "", "to the first line, to the newest one")
    yield Key("log", ("slash",), "search", "Search", "mark the lines that have all of these words")
    yield Key("log", ("n", "N"), "next({by})", "Next", "the marked line before, the next one")
    yield Key("log", ("escape", "l", "q"), "dismiss", "Close", "back to the nodes")

    yield Key("prompt", ("enter",), "", "", "take what is written")
    yield Key("prompt", ("escape",), "", "", "leave everything as it is")
    yield Key(
        "prompt",
        ("ctrl+y",),
        "copy",
        "",
        "where an act is to be confirmed: copy it as an oobleckctl command instead",
    )


KEYS: tuple[Key, ...] = (*_everywhere(), *_lists(), *_screens())
# What the first, second, … of several keys give to their action.
STEPS: dict[str, int] = {
    "comma": -1, "full_stop": 1, "less_than_sign": -30, "greater_than_sign": 30, "up": -1, "k": -1, "down": 1,
    "j": 1, "pageup": -10, "pagedown": 10, "home": -1_000_000, "end": 1_000_000, "left": -1, "right": 1,
    "tab": 1, "shift+tab": -1, "n": -1, "N": 1, "left_square_bracket": -1, "right_square_bracket": 1,
}  # fmt: skip


def of(scope: Scope) -> tuple[Key, ...]:
    """The keys of one scope."""
    return tuple(key for key in KEYS if key.scope == scope)


def everywhere(screen: ScreenName) -> tuple[Key, ...]:
    """The keys that work on every screen; without the filter's on one that has nothing to filter."""
    return tuple(key for key in of("everywhere") if key.action != "app.filter" or screen in FILTERED)


def on(screen: ScreenName) -> tuple[Key, ...]:
    """The keys that work on a screen, its own first."""
    lists = of("list") if screen in LISTS else ()
    return (*of(screen), *lists, *everywhere(screen))


def bound(keys: Iterable[Key]) -> Iterator[tuple[str, str, str]]:
    """Key, action and label of each single key, as Textual wants them."""
    for key in keys:
        for name in key.keys:
            yield name, key.action.replace("{by}", str(STEPS.get(name, 0))), key.label


def footer(screen: ScreenName) -> tuple[Key, ...]:
    """What the footer shows, most useful first, at most ``MAX_IN_FOOTER``."""
    ranked = sorted((key for key in on(screen) if key.rank), key=lambda key: key.rank)
    return tuple(ranked[:MAX_IN_FOOTER])
