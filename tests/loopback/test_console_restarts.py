"""The daemon dies under a console, time and again: it is there again within 5 s of the daemon, and no event
is lost or doubled.

What the console's feed hears is compared by number with what the daemon kept; that the picture comes back is
seen in a terminal. Three times here, twenty in ``make soak``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.sleeping import environment_asleep
from oobleckd.console.facts import AnyFact, ChangesHeard
from oobleckd.console.feed import Feed
from oobleckd.console.model import View, fold
from oobleckd.protocol.api import Status
from oobleckd.protocol.changes import Change
from tests.helpers.cluster import BIN, Cluster, tiny_job
from tests.helpers.terminal import Terminal

BACK_S = 5.0
ASLEEP_S = (0.0, 0.005, 0.0)  # of a pass of embedding, block and head: trained on, with cores free
# Of the shell itself, of what was missed, of the console: they bear no number of their own.
_UNNUMBERED = frozenset({"daemon", "gap", "console"})


@contextmanager
def listening(cluster: Cluster) -> Iterator[list[AnyFact]]:
    """What a console is told, while it is."""
    told: list[AnyFact] = []
    feed = Feed(cluster.client, told.append)
    threads = [threading.Thread(target=thread) for thread in feed.threads]
    for thread in threads:
        thread.start()
    try:
        yield told
    finally:
        feed.close()
        for thread in threads:
            thread.join()


def heard(told: list[AnyFact]) -> list[Change]:
    return [fact.change for fact in told if isinstance(fact, ChangesHeard)]


def restart(cluster: Cluster, terminal: Terminal) -> None:
    """Kill the daemon, see it missed, start it, and see the console back in time."""

    def shows(words: str) -> str | None:
        return terminal.row(words)

    def answers() -> Status | None:
        return cluster.client.status()

    cluster.kill_daemon()
    cluster.until(lambda: shows("◌ STALE"), "the console misses the daemon")
    cluster.start_daemon()
    cluster.until(answers, "a daemon that answers")
    cluster.until(lambda: shows("● live"), f"the console again within {BACK_S} s", timeout_s=BACK_S)


@pytest.mark.parametrize("times", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_time_and_again(tmp_path: Path, times: int) -> None:
    env = environment_asleep(tmp_path / "asleep.json", ASLEEP_S)
    with Cluster(tmp_path / "c", 4, env=env) as cluster:
        cluster.usable(4)
        job = cluster.client.submit(tiny_job("steady", train={"steps": 100_000})).id
        cluster.at_step(job, 3)
        command = str(BIN / "oobleck-console")
        with Terminal(tmp_path / "tmux", command, cluster.env) as terminal, listening(cluster) as told:
            cluster.until(lambda: terminal.row("● live", "steady"), "the console")
            for _ in range(times):
                before = cluster.client.job(job).step
                restart(cluster, terminal)
                cluster.at_step(job, before + 1)
            cluster.client.control(job, "pause")
            cluster.job_in(job, "paused")
            kept = [
                change for change in cluster.client.events(0, follow=False) if change.kind not in _UNNUMBERED
            ]
            cluster.until(
                lambda: heard(told)[-1].seq >= kept[-1].seq or None, "the last event in the console"
            )
            step = cluster.client.job(job).step
            cluster.until(lambda: terminal.row(f"step {step:,}/"), "the last step in the terminal")
        cluster.client.control(job, "cancel")
    events = [change for change in heard(told) if change.kind not in _UNNUMBERED]
    assert not [change for change in heard(told) if change.kind == "gap"]
    assert all(one.seq < two.seq for one, two in pairwise(events)), "doubled, or out of order"
    first = max(events[0].seq, kept[0].seq)
    assert [change.seq for change in events if first <= change.seq <= kept[-1].seq] == [
        change.seq for change in kept if change.seq >= first
    ]
    view = fold(View(), told)
    assert [point.step for point in view.points] == sorted({point.step for point in view.points})
