"""The console in a real terminal: keys walk its eight screens while nodes are killed, and what is captured is
what oobleckctl says.

The job stays re-routed after a loss (policy slipstream), so that every step that is looked at has the work of
the dead in it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from benchmarks.sleeping import environment_asleep
from oobleckd.words import ms, size
from tests.helpers.cluster import BIN, Cluster, tiny_job
from tests.helpers.terminal import Terminal

NODES = 6
ASLEEP_S = (0.0, 0.005, 0.0)
"""Of a pass of embedding, block and head: what is looked at is there for long, and needs no core all that
time.
"""
_STEP = re.compile(r"Pipelines, measured +step ([\d,]+)")


class Walk:
    """A cluster, a job on it, and a console that looks at it."""

    def __init__(self, cluster: Cluster, terminal: Terminal, job: str) -> None:
        self.cluster, self.terminal, self.job = cluster, terminal, job

    def get(self, *words: str) -> Any:
        """What oobleckctl prints of it as JSON."""
        return json.loads(self.cluster.ctl("-o", "json", *words).stdout)

    def row(self, *parts: str) -> str:
        """The line with ``parts``, once it is there."""
        return self.until(lambda: self.terminal.row(*parts), f"a line with {parts}")

    def say(self, key: str, title: str, words: str) -> None:
        """Have ``key`` ask for a line, and write it."""
        self.terminal.press(key)
        self.row(f"─ {title}")
        self.terminal.type(words)
        self.row(f"│{words} ")
        self.terminal.press("Enter")
        self.gone(f"─ {title}")

    def gone(self, words: str) -> None:
        """Wait until ``words`` are nowhere."""
        self.until(lambda: None if words in self.terminal.text() else True, f"nothing with {words!r}")

    def until(self, check: Callable[[], Any], what: str) -> Any:
        try:
            return self.cluster.until(check, what, timeout_s=120.0)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.terminal.text()}") from error

    def screen(self, key: str, title: str) -> None:
        """Go to a screen, and wait for a panel of it."""
        self.terminal.press(key)
        self.row(f"─ {title}")

    def incidents(self, count: int) -> list[dict[str, Any]]:
        """So many, all over."""

        def over() -> bool | None:
            found = self.cluster.client.incidents()
            return (len(found) == count and not any(each.open for each in found)) or None

        self.until(over, f"{count} incidents that are over")
        found: list[dict[str, Any]] = self.get("get", "incidents")["items"]
        return found


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    folder = tmp_path_factory.mktemp("walk")
    with Cluster(folder / "c", NODES, env=environment_asleep(folder / "asleep.json", ASLEEP_S)) as cluster:
        cluster.usable(NODES)
        job = tiny_job("walked", train={"steps": 100_000}, fault_tolerance={"f": 2, "policy": "slipstream"})
        name = cluster.client.submit(job).id
        cluster.at_step(name, 5)
        with Terminal(folder / "tmux", str(BIN / "oobleck-console"), cluster.env) as terminal:
            yield Walk(cluster, terminal, name)
        cluster.client.control(name, "cancel")


def test_a_loss_on_every_screen(walk: Walk) -> None:
    cluster, terminal = walk.cluster, walk.terminal
    walk.row("can still lose 2 of 2 nodes", "walked running")
    victim = cluster.client.pipelines()[-1].nodes[-1]
    cluster.kill(victim, "sigkill")
    walk.row("✗", victim, "lost")
    (incident,) = walk.incidents(1)
    _overview(walk, incident)
    _nodes(walk, victim)
    _pipelines(walk, victim)
    _templates(walk)
    _incidents(walk, incident)
    walk.screen("6", "Where the time went")
    walk.row("no step lost in 1 incident")
    walk.row("goodput", "of device time")
    walk.screen("7", "Event ")
    walk.row("node", f"{victim} lost:")
    second = _what_if(walk, victim)
    terminal.press("1")
    walk.row("✗", second, "lost")
    walk.incidents(2)
    walk.row("2 of 2", "─")
    tolerance = walk.get("describe", "job", walk.job)["tolerance"]
    walk.row(f"can still lose {tolerance} of 2 nodes")
    walk.row("2 incidents, 0 steps lost")


def _overview(walk: Walk, incident: dict[str, Any]) -> None:
    """Phases and total are those of the command line, and so is what can still be lost."""
    spent: dict[str, float] = {}
    for phase in incident["phases"]:
        spent[phase["phase"]] = spent.get(phase["phase"], 0.0) + phase["duration_s"]
    assert {"detect", "resume"} <= spent.keys()
    walk.row(incident["id"], f"total {ms(incident['total_s'])}")
    for phase, took_s in spent.items():
        walk.row(f" {phase} ", f" {ms(took_s)} ")
    tolerance = walk.get("describe", "job", walk.job)["tolerance"]
    walk.row(f"can still lose {tolerance} of 2 nodes")


def _nodes(walk: Walk, victim: str) -> None:
    """State, layers and the fewest live copies of every node."""
    walk.screen("2", "Live copies of each layer")
    copies = {layer["layer"]: layer["copies"] for layer in walk.get("get", "layers")["items"]}
    for node in walk.get("get", "nodes")["items"]:
        held = [layer for part in node["layers"] for layer in range(part["start"], part["stop"])]
        # How it was lost grows while others tell of it, and has no more room than the row has.
        gone = re.escape(node["reason"][:10]) if node["reason"] else r"-(?!\S)"
        fewest = rf"{min(copies[layer] for layer in held)}(?!\S)" if held else gone
        row = walk.until(
            lambda node=node, fewest=fewest: next(
                (
                    line
                    for line in walk.terminal.lines()
                    if re.search(rf"{node['name']} +{node['state']}\b.* {fewest}", line)
                ),
                None,
            ),
            f"{node['name']} {node['state']} with {fewest} copies",
        )
        assert ("✗" in row) == (node["name"] == victim)


def _pipelines(walk: Walk, victim: str) -> None:
    """Of the step in sight, who runs how many micro-batches of whom."""
    terminal = walk.terminal
    walk.screen("3", "Pipelines, measured")
    walk.row("↪ runs", f"of {victim}/0")
    terminal.press("Space")
    walk.row("FROZEN")
    found = _STEP.search(terminal.text())
    assert found, terminal.text()
    schedule = walk.get("describe", "schedule", walk.job, "--step", found[1].replace(",", ""))
    moved: dict[tuple[int, str], set[int]] = {}
    for lane in schedule["lanes"]:
        for _, _, micro_batch, _, _, origin, *_ in lane["ops"]:
            if origin:
                moved.setdefault((lane["pipeline"], origin), set()).add(micro_batch)
    assert {origin for _, origin in moved} == {f"{victim}/0"}
    for (pipeline, origin), numbers in moved.items():
        words = f"↪ runs {len(numbers)} micro-batch{'es' * (len(numbers) > 1)} of {origin}"
        walk.row(f"▾ P{pipeline} ", words)
    terminal.press("Space")
    walk.gone("FROZEN")
    for mode in ("modelled", "difference", "measured"):
        terminal.press("m")
        walk.row(f"─ Pipelines, {mode}")


def _templates(walk: Walk) -> None:
    walk.screen("4", "Coverage")
    for template in walk.get("get", "templates")["items"]:
        numbers = (
            rf"\b{template['num_nodes']} +{template['instances']} +{len(template['stages'])} +"
            + re.escape(size(max(template["memory_bytes"])))
        )
        walk.until(
            lambda numbers=numbers: next(
                (line for line in walk.terminal.lines() if re.search(numbers, line)), None
            ),
            f"the template of {template['num_nodes']} nodes",
        )


def _incidents(walk: Walk, incident: dict[str, Any]) -> None:
    walk.screen("5", "Work and choices")
    walk.row(f"✓ {incident['id']}", ms(incident["total_s"]), ", ".join(incident["nodes"]))
    walk.row("chosen: ", incident["reason"][:40])
    for other in incident["rejected"]:
        walk.row("✗ ", other["what"][:20])


def _what_if(walk: Walk, gone: str) -> str:
    """Mark a node, compare what follows with the command line, and let it die; its name."""
    terminal = walk.terminal
    second = next(
        node.name for node in walk.cluster.client.nodes() if node.state == "active" and node.name != gone
    )
    walk.screen("8", "What follows")
    walk.say("/", "/ filter", second)
    # The lost one may have the words, too: who missed it first is named in its reason.
    walk.row(f'of 6 nodes have "{second}"')
    terminal.press("m")
    walk.row(f"─ Without {second}")
    asked = walk.get("what-if", "--without", second)
    assert not asked["stops"]
    walk.row("throughput", f" {asked['throughput']:.1%}")
    walk.row(f"could still lose {asked['can_lose']}")
    terminal.press("i")
    walk.row(f"oobleckctl kill-node {second} --how sigkill")
    if asked["lost_layers"] or asked["steps_back"]:
        terminal.write("walked")
    else:
        terminal.press("Enter")
    walk.gone("oobleckctl kill-node")
    terminal.press("Escape")  # the filter goes; a key at once behind it would be one with alt
    walk.gone("nodes have")
    return second


def test_the_window_may_have_any_size(walk: Walk) -> None:
    terminal = walk.terminal
    for width, height in ((20, 5), (1, 1), (80, 24), (160, 46)):
        terminal.resize(width, height)
        terminal.press("2", "1")
    walk.row("─ Nodes ")
    walk.row("● live", "walked")


# What is measured all the time and is no change: ages of heartbeats, and what devices say of themselves every
# few seconds. The past has it as it was at its snapshot, and by the time that the live picture is read, that
# of some node is another one.
_MEASURED = re.compile(
    r"(\d+ (d|h|min) )*\d[\d.,]* (ms|s|min|([KMGT]i)?B|W|°C|MHz)(?!\w)|\d+%!?|[█▏▎▍▌▋▊▉┊·]+"
)


def _drawn(walk: Walk, key: str, title: str, words: str) -> list[str]:
    """A screen below the verdict once it has ``words``, without what is measured, and without the room
    that took.
    """
    walk.screen(key, title)
    walk.row(words)
    return [" ".join(_MEASURED.sub("", line).split()) for line in walk.terminal.lines()[3:]]


def _past(walk: Walk, moment: float, key: str, title: str, words: str) -> list[str]:
    """The same at ``moment``, and back to now."""
    walk.screen(key, title)
    walk.say("t", "t time", datetime.fromtimestamp(moment).astimezone().isoformat())
    walk.row("◀ PAST")
    lines = _drawn(walk, key, title, words)
    walk.terminal.press("Escape")
    walk.gone("◀ PAST")
    return lines


def test_the_screens_of_a_moment_are_those_that_were_live(walk: Walk) -> None:
    cluster = walk.cluster
    if not walk.get("get", "incidents")["items"]:  # nobody has walked before
        cluster.kill(cluster.client.pipelines()[-1].nodes[-1], "sigkill")
        walk.incidents(1)
    walk.gone("on its way to")  # what was said of the last act goes by itself, in the past as well
    cluster.client.control(walk.job, "pause")
    cluster.job_in(walk.job, "paused")
    titles = {
        # Not the layers of a stage: where the cut is follows from what layers took when they were measured.
        "2": ("Live copies of each layer", " live: "),
        "4": ("Coverage", "covered"),
        "5": ("Work and choices", "chosen: "),
    }

    def same(key: str) -> tuple[float, list[str]] | None:
        """The moment of the newest snapshot, if then it was as it is now: the live picture and the snapshots
        both take a while to know the last.
        """
        moment = cluster.client.past(time.time()).snapshot.at
        live, past = _drawn(walk, key, *titles[key]), _past(walk, moment, key, *titles[key])
        return (moment, live) if live == past else None

    seen = {key: walk.until(lambda key=key: same(key), f"screen {key} as it was") for key in titles}
    cluster.client.control(walk.job, "resume")
    cluster.at_step(walk.job, cluster.client.job(walk.job).step + 2)
    for key, each in titles.items():
        moment, live = seen[key]
        walk.until(
            lambda moment=moment, live=live, key=key, each=each: (
                _past(walk, moment, key, *each) == live or None
            ),
            f"the same as it was live:\n{chr(10).join(live)}\n",
        )
