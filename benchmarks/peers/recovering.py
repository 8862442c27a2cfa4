"""The peers that survive a kill -9, each as a set of programs with a kill: torchrun's restart, and torchft.

Owns how each is started, with its fastest sensible settings, and what its kill costs. Definitions: README.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.cost import Cost, missing_of
from benchmarks.peers import shape
from benchmarks.peers.attempts import Attempt
from benchmarks.peers.launch import Programs
from oobleckd.host.ports import free_port

NORMAL_STEPS = 8
"""Undisturbed steps of every process before each kill."""
_TIMEOUT_S = 180.0
_STEPS_FOR_MEDIAN = 20


@dataclass(frozen=True, slots=True)
class Peer:
    """``ranks`` processes; ``full`` is what ``Attempt.groups`` says when none is missing.

    ``reads_on``: a step that was thrown away is not tried again with the same samples.
    """

    name: str
    victims: tuple[str, ...]
    full: int
    reads_on: bool


TORCHRUN = Peer("torchrun restart", tuple(f"rank{rank}" for rank in range(4)), 4, reads_on=False)
TORCHFT = Peer("torchft, 4 groups of 1", tuple(f"group{group}" for group in range(4)), 4, reads_on=True)
TORCHFT_2X2 = Peer(
    "torchft, 2 groups of 2 stages", tuple(f"group{g}-stage{s}" for g in range(2) for s in range(2)), 2,
    reads_on=True
)  # fmt: skip


def start_torchrun(programs: Programs) -> None:
    """Four DDP workers under one agent; all restart from the last checkpoint when one dies."""
    checkpoints = programs.folder / "checkpoints"
    checkpoints.mkdir()
    argv = [*_torchrun(sys.executable, 4), "benchmarks.peers.train_ddp", "--checkpoints", str(checkpoints)]
    programs.start("agent", argv, **_FRESH_STORE)


def start_torchft(programs: Programs, python: Path, *, groups: int) -> None:
    """A lighthouse with timeouts of 1 s, and ``groups`` groups, each under a torchrun that restarts it."""
    port = free_port()
    timeouts = ["--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000", "--quorum_tick_ms", "100"]
    lighthouse = str(python.parent / "torchft_lighthouse")
    programs.start(
        "lighthouse", [lighthouse, "--bind", f"127.0.0.1:{port}", "--min_replicas", "1", *timeouts]
    )
    ranks = shape.NUM_PROCESSES // groups
    module = "benchmarks.peers.train_torchft" if ranks == 1 else "benchmarks.peers.train_torchft_1f1b"
    # A group of one has no store of its own: its Manager needs the agent's.
    store = {} if ranks == 1 else _FRESH_STORE
    for group in range(groups):
        programs.start(
            f"group{group}", [*_torchrun(str(python), ranks), module], **store,
            REPLICA_GROUP_ID=str(group), TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}",
        )  # fmt: skip


# torch 2.13 keeps one TCPStore over all restarts, and the dead round's gloo addresses in it make the next
# rounds
# fail; with this variable every round has a store of its own, and the restart works.
_FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _torchrun(python: str, ranks: int) -> list[str]:
    return [
        python, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(ranks), "--max-restarts", "100", "--module",
    ]  # fmt: skip


def kills(peer: Peer, programs: Programs, rounds: int, rng: random.Random) -> Iterator[Cost]:
    """Kill one process after the other, each at a random moment of a step of a job that is whole again."""
    for _ in range(rounds):
        _await_whole(peer, programs, time.time(), NORMAL_STEPS)
        time.sleep(rng.random() * _step_s(programs.attempts(), time.time()))
        victim = rng.choice(peer.victims)
        pid = next(attempt.pid for attempt in reversed(programs.attempts()) if attempt.who == victim)
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        _await_whole(peer, programs, killed_at, 1)
        yield cost_of(peer, programs.attempts(), killed_at)


def _await_whole(peer: Peer, programs: Programs, since: float, steps: int) -> None:
    """Wait until every process has begun and committed so many steps after ``since`` with nobody missing."""

    def check(seen: list[Attempt]) -> bool | None:
        done = dict.fromkeys(peer.victims, 0)
        for attempt in seen:
            if attempt.began_at > since and attempt.committed and attempt.groups == peer.full:
                done[attempt.who] += 1
        return True if min(done.values()) >= steps else None

    programs.until(check, f"{peer.name}: {steps} steps of every process with nobody missing", _TIMEOUT_S)


def _step_s(seen: list[Attempt], before: float) -> float:
    """Median time from commit to commit of the last steps before, in the life of a process."""
    by_process: dict[int, list[float]] = {}
    for attempt in seen:
        if attempt.committed and attempt.ended_at <= before:
            by_process.setdefault(attempt.pid, []).append(attempt.ended_at)
    gaps = [
        later - earlier
        for ends in by_process.values()
        for earlier, later in pairwise(ends[-_STEPS_FOR_MEDIAN:])
    ]
    return statistics.median(gaps)


def cost_of(peer: Peer, seen: list[Attempt], killed_at: float) -> Cost:
    """What a kill cost, from the attempts up to the first step with nobody missing again.

    The next committed step is the first that began after the kill: the dead process had no part in it.
    """
    furthest = max(a.step for a in seen if a.committed and a.ended_at <= killed_at)
    after = [a for a in seen if a.ended_at > killed_at]
    good = [a for a in after if a.committed and a.began_at > killed_at]
    whole = next(a for a in good if a.groups == peer.full)
    redone = max(0, furthest - (min(a.step for a in good) - 1))
    thrown_away: dict[int, int] = {}
    for attempt in after:
        if not attempt.committed:
            thrown_away[attempt.pid] = thrown_away.get(attempt.pid, 0) + 1
    discarded = max(thrown_away.values(), default=0)
    until_whole = sorted(
        {a.step: a for a in reversed(good) if a.ended_at <= whole.ended_at}.values(), key=_ended
    )
    missing, missing_s = missing_of([(a.ended_at, 1 - a.groups / peer.full) for a in until_whole])
    short = {a.step: peer.full - a.groups for a in good if a.ended_at < whole.ended_at}
    return Cost(
        step_s=_step_s(seen, killed_at),
        next_step_s=good[0].ended_at - killed_at,
        steps_redone=redone,
        attempts_discarded=discarded,
        samples_lost=discarded * shape.GLOBAL_BATCH if peer.reads_on else 0,
        samples_short=sum(short.values()) * shape.GLOBAL_BATCH // peer.full,
        whole_s=whole.ended_at - killed_at,
        missing=missing,
        missing_s=missing_s,
    )


def _ended(attempt: Attempt) -> float:
    return attempt.ended_at
