"""One word for each concept: no class name means two things, and no word that was given up comes back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("console", "oobleckd", "planner", "worker")

SAME_NAME: dict[str, str] = {
    "Manifest": "what manifest.json has: of a checkpoint, and of prepared tokens",
    "Tell": "one meaning, a message to be sent: a command of the core's, and of the round machine's",
}
"""Classes that two modules have by one name, and why each pair may."""

RETIRED = {
    "beacon": "heartbeat",
    "beat": "heartbeat",
    "beforehand": "pre-copy",
    "blast": "impact",
    "letter": "tensor message",
    "new life": "new incarnation",
    "plane": "group manager",
    "pulse": "activity page",
    "road": "backend",
    "shadow": "redundant layers",
    "twin": "reference run",
    "way back": "rollback",
}
"""Words that were given up, and what is said instead."""

EXEMPT = {
    # The other meaning: what is known or done before something else.
    "docs/decisions/checkpoints.md": {"beforehand"},
    "docs/decisions/data.md": {"beforehand"},
    "docs/decisions/detection.md": {"beforehand"},
    "docs/decisions/planner.md": {"beforehand"},
    "docs/decisions/policies.md": {"beforehand"},
    "docs/decisions/watching.md": {"beforehand"},
    "docs/watching.md": {"beforehand"},
    "worker/models/deferral.py": {"beforehand"},
    "worker/round/op_times.py": {"beforehand"},
    # The other meaning: a character of a text, and of an order of ops.
    "console/app.py": {"letter"},
    "console/letters.py": {"letter"},
    "console/screens/modal.py": {"letter"},
    "console/screens/page.py": {"letter"},
    "console/screens/palette.py": {"letter"},
    "console/tui.py": {"letter"},
    "console/widgets/panel.py": {"letter"},
    "console/widgets/timeline.py": {"letter"},
    "docs/console.md": {"letter"},
    "docs/decisions/console.md": {"letter"},
    "docs/decisions/schedules.md": {"letter"},
    "docs/glossary.md": {"letter"},
    "docs/limits.md": {"letter"},
    "docs/schedules.md": {"letter"},
    "oobleckd/daemon/keys.py": {"letter"},
    "oobleckd/daemon/tokens.py": {"letter"},
    "oobleckd/host/journald.py": {"letter"},
    "oobleckd/protocol/changes.py": {"letter"},
    "planner/schedules/decoupled.py": {"letter"},
    "planner/schedules/orders.py": {"letter"},
    "planner/schedules/pipe.py": {"letter"},
    "worker/processes/watchdog.py": {"letter"},
    # Names in files, messages and answers, which stay.
    "docs/api.md": {"beat", "blast", "shadow"},
    "docs/observability.md": {"beat"},
    "docs/troubleshooting.md": {"beat"},
    "oobleckd/daemon/debugapi.py": {"beat"},
    "oobleckd/daemon/http.py": {"beat"},
    "oobleckd/daemon/metrics.py": {"beat"},
    "oobleckd/daemon/openapi.py": {"blast"},
    "oobleckd/daemon/watchapi.py": {"blast"},
    "oobleckd/host/settings.py": {"beat", "road"},
    "oobleckd/protocol/nodeviews.py": {"beat", "shadow"},
    "oobleckd/protocol/agentmessages.py": {"beat"},
    "oobleckd/protocol/datagrams.py": {"beat"},
    "oobleckd/protocol/jobschedule.py": {"shadow"},
    "oobleckd/simulator/costs.py": {"beforehand"},
    "planner/plan.py": {"shadow"},
    "planner/profile.py": {"shadow"},
    "CHANGELOG.md": {"beat", "beforehand", "blast", "road", "shadow"},
}
"""Files in which a word may stand nevertheless."""


def modules() -> Iterator[Path]:
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT)):
                yield path


def texts() -> Iterator[tuple[str, str]]:
    """What people read: names, comments and strings of the code, and the pages."""
    for path in modules():
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        kinds = (tokenize.NAME, tokenize.STRING, tokenize.COMMENT)
        words = "\n".join(token.string for token in tokens if token.type in kinds)
        yield path.relative_to(ROOT).as_posix(), words
    for path in (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def found_in(text: str) -> set[str]:
    """Retired words in ``text``: alone, in the plural, and as parts of names."""
    lower = text.lower()
    here = [word for word in RETIRED if word.partition(" ")[0] in lower]  # a look that takes no time
    return {
        word
        for word in here
        if re.search(rf"(?<![a-z]){word.replace(' ', '[ _]')}(s|ed|ing)?(?![a-z])", text, re.IGNORECASE)
        or re.search(rf"(?<![A-Z]){word.title()}s?(?![a-z])", text)
    }


def test_no_class_name_is_in_two_modules_without_a_reason() -> None:
    where = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: places for name, places in where.items() if len(places) > 1 and name not in SAME_NAME} == {}


def test_no_retired_word_comes_back_and_exempt_is_only_who_needs_it() -> None:
    """To look through all files takes seconds."""
    found = {name: found_in(text) for name, text in texts()}
    assert {name: more for name in found if (more := found[name] - EXEMPT.get(name, set()))} == {}
    needless = {name: EXEMPT[name] - found.get(name, set()) for name in EXEMPT}
    assert {name: words for name, words in needless.items() if words} == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("its beats", {"beat"}),
        ("beat_s", {"beat"}),
        ("class Beat:", {"beat"}),
        ("heartbeat_s of a HeartbeatSender", set()),
        ("a broad way", set()),
        ("the way back", {"way back"}),
        ("_way_back_s", {"way back"}),
        ("ShadowMap", {"shadow"}),
        ("overshadowed", set()),
    ],
)
def test_words_are_found_in_names_and_text(text: str, words: set[str]) -> None:
    assert found_in(text) == words
