"""Every command of README, tutorial and reference is one: the real parser takes it, and what only reads or
asks does so.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from oobleckd.ctl.main import main
from oobleckd.protocol.jobviews import StepView
from oobleckd.protocol.requests import Accepted
from tests.helpers.api_server import job_view, node_view
from tests.unit.ctl.conftest import Ctl
from tests.unit.ctl.test_verbs import INCIDENT
from tests.unit.ctl.test_watch import watched

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("README.md", "docs/tutorial.md", "docs/oobleckctl.md")
ALSO = tuple(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/**/*.md")))
"""Pages of which the blocks alone are taken: in their sentences commands are often cut short."""

ASKING = {"status", "get", "describe", "events", "story", "pause", "resume", "cancel", "delete", "drain",
          "undrain", "forget-node", "kill-node", "explain", "what-if", "checkpoint", "wait", "config",
          "completion"}  # fmt: skip
"""Verbs that need a daemon at most: these are run. The others start programs, train, or wait for that."""

ENDLESS = {"-w", "-f", "--watch", "--follow"}
_ENDS = {"|", "||", "&&", ";", ")", ">", "<", ">>", "&", "<(", "|&"}


class DocCommand(NamedTuple):
    """``oobleckctl`` with ``words``, as it stands on a ``page``."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands_of(page: str) -> list[DocCommand]:
    """Every call of oobleckctl in the blocks of a page, in their order; continued lines are one."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    shell = [block for language, block in blocks if language in {"", "bash", "sh", "console"}]
    lines = [line for block in shell for line in block.replace("\\\n", " ").splitlines()]
    if page in PAGES:
        # A verb alone, or with a placeholder, is named in a sentence and not called.
        spans = [span for span in re.findall(r"`(oobleckctl [^`]*)`", text) if len(span.split()) > 2]
        lines += [span.replace("\n", " ") for span in spans if "VERB" not in span]
    found = (DocCommand(page, words) for line in lines for words in _calls(line))
    return list(dict.fromkeys(found))


def _calls(line: str) -> list[tuple[str, ...]]:
    """The words of each call in a line of a shell."""
    if "oobleckctl" not in line or line.startswith(("error:", "hint:")) or " [--" in line:
        return []
    line = re.sub(r"\s#.*", "", line)
    line = re.sub(r"\$\((?!oobleckctl)[^)]*\)", "some", re.sub(r"\$\{?\w+\}?", "gpt2-3", line))
    lexer = shlex.shlex(line.replace("$(", " ( "), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split, lexer.commenters = True, "#"
    calls: list[list[str]] = []
    inside = False
    for word in lexer:
        if word == "oobleckctl":
            calls.append([])
            inside = True
        elif word in _ENDS or set(word) <= set("();<>|&"):
            inside = False
        elif inside and word not in {"…", "..."}:
            calls[-1].append(word)
    if "xargs" in line:
        calls[-1].append("gpt2-3")  # which comes by the pipe
    return [tuple(words) for words in calls if words]


COMMANDS = [command for page in dict.fromkeys((*PAGES, *ALSO)) for command in commands_of(page)]


def test_there_are_commands_on_every_page() -> None:
    assert all(len([c for c in COMMANDS if c.page == page]) >= 8 for page in PAGES)
    assert len(COMMANDS) > 100


def parsed(words: tuple[str, ...]) -> None:
    """As click does it, but for running the verb. Raises click.UsageError."""
    context: click.Context = main.make_context("oobleckctl", list(words))
    command: click.Command = main
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None, words
        context, command = found.make_context(name, rest, parent=context), found


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_parser_takes_it(command: DocCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOBLECK_STATE", str(tmp_path))
    with contextlib.suppress(click.exceptions.Exit):  # of --help and --version
        parsed(command.words)


RUN = [
    command for command in COMMANDS
    if command.page in PAGES and command.words[0] in ASKING and not ENDLESS & set(command.words)
]  # fmt: skip


@pytest.fixture
def full(ctl: Ctl) -> Ctl:
    """A daemon that knows every name on the pages."""
    watched(ctl.api)
    names = {word for command in RUN for word in command.words if re.fullmatch(r"gpt2[\w-]*", word)}
    names |= {word.partition("/")[2] for command in RUN for word in command.words if word.startswith("job/")}
    ctl.api.jobs = [
        job_view(id=name, name=name, step=2000, incidents=3, checkpoint="/c") for name in sorted(names - {""})
    ]
    ctl.api.nodes = [node_view(f"node-{number}") for number in range(1, 10)]
    ctl.api.incidents = [INCIDENT]
    step = StepView(1, 2.0, "", 1.0, 0.1, 8, "x", "applied", 1, 9.0, 0.25)
    ctl.api.steps = {name: [step] for name in names}
    ctl.api.on_act = lambda path, _body: Accepted(path.rpartition("/")[2], "done")
    return ctl


@pytest.mark.parametrize("command", RUN, ids=str)
def test_what_asks_a_daemon_at_most_runs(
    full: Ctl, command: DocCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if command.words == ("checkpoint", "gpt2-3", "--wait"):
        return  # waits for a folder that nobody writes here: ``test_verbs`` has it
    result = full(*command.words)
    assert result.exit_code == 0, result.stderr
