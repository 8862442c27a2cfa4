"""The demo: seven nodes on this machine, a small GPT-2, nodes that die, and a comparison to the last bit.

Everything is done by the installed commands, as a user would do it; only what is shown meanwhile comes from
the API. The cluster lives in a temporary folder. However this ends (also by Ctrl-C or SIGTERM), it ends the
cluster that it started; with ``--keep`` one that came to its end stays, to be looked at. At the end it says
what was proven, and what restarts from checkpoints would have lost: an estimate from the numbers of this run
alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from oobleckd.client import Client, socket_of
from oobleckd.ctl.compare import Verdict
from oobleckd.protocol.changes import JobMoved
from oobleckd.protocol.incidentviews import IncidentView
from oobleckd.protocol.jobviews import JobView

JOB = Path(__file__).with_name("gpt2-stdlib.toml")
NUM_NODES = 7
NUM_STAGES = 3
LOOK_EVERY_S = 0.3
LINE_EVERY_STEPS = 10
WORDS_OF_STATE = {
    "profiling": "measuring the time and memory of each layer",
    "planning": "planning pipelines, for each number of nodes that may be left",
    "deploying": "loading the model",
}
console = Console(highlight=False)


def say(text: str, style: str = "") -> None:
    """A line for people, not wrapped and as it is."""
    console.print(text, style=style, markup=False, soft_wrap=True)


class DemoFailed(Exception):
    """Something did not go as it should have; the message says what."""


# ------------------------------------------------------------------- numbers, and what they say


@dataclass(frozen=True, slots=True)
class Start:
    """What it took to start: processes (``up``), and from the plan to the end of the first step."""

    processes_s: float
    first_step_s: float

    @property
    def total_s(self) -> float:
        """What a restart takes that starts processes and loads the model, and measures and plans nothing."""
        return self.processes_s + self.first_step_s


@dataclass(frozen=True, slots=True)
class Kill:
    """Nodes killed after ``step`` committed steps, when the last checkpoint had ``checkpoint_step`` (0: there
    was none) and a step took ``step_s``, the median of the last ones.
    """

    nodes: tuple[str, ...]
    step: int
    checkpoint_step: int
    step_s: float

    @property
    def steps_again(self) -> int:
        """Steps that a restart from the last checkpoint has to compute again."""
        return self.step - self.checkpoint_step

    def restart_s(self, start: Start) -> float:
        """What that takes, and the start before it."""
        return self.steps_again * self.step_s + start.total_s


def proven(verdict: Verdict, view: JobView, kills: Sequence[Kill], incidents: Sequence[IncidentView]) -> str:
    """What the comparison found, for somebody who sees it for the first time."""
    num_killed = sum(len(kill.nodes) for kill in kills)
    batch = view.spec.train.global_batch
    waits = " and ".join(f"{incident.committed_s:.1f} s" for incident in incidents)
    losses, weights = (
        f"{verdict.losses} of {verdict.num_losses}",
        f"{verdict.weights} of {verdict.num_weights}",
    )
    return (
        "What was proven\n"
        f"  Same bits.         {losses} losses and {weights} weight tensors are those of the run without\n"
        "                     failures, bit for bit.\n"
        f"  Each sample once.  {verdict.samples:,} samples were counted, {view.steps} steps of {batch}: in "
        "each step the same\n"
        "                     ones as without failures.\n"
        f"  No step lost.      {num_killed} nodes were killed with SIGKILL; {view.steps_lost} committed "
        "steps were thrown away. The\n"
        f"                     steps that were running committed {waits} after the failure was seen."
    )


def restarts(kills: Sequence[Kill], start: Start, incidents: Sequence[IncidentView]) -> str:
    """What restarts from the last checkpoint would have lost at the same kills, and how that is computed."""
    lines = []
    for kill in kills:
        since = f"the checkpoint of step {kill.checkpoint_step}" if kill.checkpoint_step else "the start"
        lines.append(
            f"  killed after step {kill.step}: {kill.steps_again} steps since {since} x {kill.step_s:.2f} s"
            f" + {start.total_s:.1f} s to start = {kill.restart_s(start):.1f} s"
        )
    steps = sum(kill.steps_again for kill in kills)
    total_s = sum(kill.restart_s(start) for kill in kills)
    recovered_s = sum(incident.total_s for incident in incidents)
    steps_lost = sum(incident.steps_lost for incident in incidents)
    each = "\n".join(lines)
    return (
        "What restarts from the last checkpoint would have lost: an estimate, from the numbers of this run\n"
        f"{each}\n"
        f"  Together: {steps} steps computed again, {total_s:.1f} s. Here: {steps_lost} steps; the "
        f"recoveries took {recovered_s:.1f} s.\n"
        "  (A step takes the median of the last ones before the kill. A start takes what it took here:\n"
        f"  {start.processes_s:.1f} s for the processes, {start.first_step_s:.1f} s from the plan to the end "
        "of the first step. The time until\n"
        "  somebody notices that the run has stopped is not counted.)"
    )


def recovered(incident: IncidentView) -> str:
    """A recovery that is over, in a line."""
    return (
        f"  recovered: step {incident.step} committed {incident.committed_s:.1f} s after the failure was "
        "seen,"
        f" {incident.steps_lost} steps lost; all done after {incident.total_s:.1f} s"
    )


def step_line(view: JobView) -> str:
    """How far a job is."""
    loss = "-" if view.loss is None else f"{view.loss:.3f}"
    return f"  step {view.step:>3}/{view.steps}  loss {loss}{on_nodes(view)}"


def on_nodes(view: JobView) -> str:
    """How many nodes train; nothing where none does."""
    return f"  {len(view.nodes)} nodes" if view.nodes else ""


# ------------------------------------------------------------------- what is shown meanwhile


class Shown:
    """The progress of a job: a bar on a terminal, elsewhere a line for every ten steps."""

    def __init__(self, progress: Progress, bar: TaskID) -> None:
        self._progress, self._bar = progress, bar
        self._line, self._state = 0, ""

    def show(self, view: JobView) -> None:
        """What there is to be seen of ``view``."""
        if view.state != self._state:
            self._state = view.state
            if view.state in WORDS_OF_STATE and not view.step:
                say(f"  {WORDS_OF_STATE[view.state]}", "dim")
        loss = f"loss {view.loss:.3f}  " if view.loss is not None else ""
        words = f"{loss}{view.state}{on_nodes(view)}"
        self._progress.update(self._bar, total=view.steps, completed=view.step, words=words)
        if not console.is_terminal and view.step // LINE_EVERY_STEPS > self._line:
            self._line = view.step // LINE_EVERY_STEPS
            say(step_line(view))


@contextmanager
def shown() -> Iterator[Shown]:
    """Show one job."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[words]}"))
    with Progress(
        *columns, console=console, refresh_per_second=4, disable=not console.is_terminal
    ) as progress:
        yield Shown(progress, progress.add_task("", total=None, words=""))


# ------------------------------------------------------------------- the demo


@dataclass(slots=True)
class Demo:
    """A cluster in ``state``, the job on it, and what has been done to it. ``after``: stages there were
    before (installing).
    """

    state: Path
    after: int = 0
    job: str = ""
    processes_s: float = 0.0
    dead: list[str] = field(default_factory=list)
    revived: list[str] = field(default_factory=list)
    returned: set[str] = field(default_factory=set)
    kills: list[Kill] = field(default_factory=list)
    told: dict[str, IncidentView] = field(default_factory=dict)

    @property
    def client(self) -> Client:
        """The API of the demo's own daemon."""
        return Client(socket_of(self.state))

    def stage(self, number: int, what: str) -> None:
        """The next part begins."""
        say(f"\n[{self.after + number}/{self.after + NUM_STAGES}] {what}", "bold")

    def ctl(self, *words: str, meanwhile: Callable[[], None] | None = None) -> str:
        """Run ``oobleckctl`` and return its data. Raises DemoFailed."""
        say(f"$ oobleckctl {' '.join(words)}", "bold")
        command = [str(Path(sys.executable).with_name("oobleckctl")), *words]
        environ = {**os.environ, "OOBLECK_STATE": str(self.state)}
        # Its notes go into a file: on a terminal they would be written into the line of the bar.
        with tempfile.TemporaryFile("w+") as notes, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=notes, text=True, env=environ
        ) as running:  # fmt: skip
            try:
                while meanwhile and running.poll() is None:
                    meanwhile()
                    time.sleep(LOOK_EVERY_S)
                output, _ = running.communicate()
            except BaseException:
                running.terminate()  # an `up` that is cut off ends what it has started by then
                raise
            notes.seek(0)
            said = notes.read().strip()
        if running.returncode:
            raise DemoFailed(f"oobleckctl {words[0]} ended with {running.returncode}: {output}{said}")
        if said and not meanwhile:
            say(said, "dim")
        return output

    # ------------------------------------------------------------------- what happens to the cluster

    def kill_two(self, view: JobView) -> None:
        """Two nodes of different pipelines at once: what f = 2 promises to survive."""
        first, last = view.pipelines[0], view.pipelines[-1]
        self._kill(view, first.nodes[0], last.nodes[-1])

    def bring_one_back(self, _view: JobView) -> None:
        """One of the dead starts again and is taken in at a step's boundary."""
        node = self.dead.pop(0)
        self.revived.append(node)
        say(f"{node} comes back", "green")
        self.ctl("start-node", node)

    def kill_another(self, view: JobView) -> None:
        """One more, of the deepest pipeline, and not the one that has just come back."""
        deepest = max(view.pipelines, key=lambda pipeline: len(pipeline.nodes))
        self._kill(view, next(node for node in deepest.nodes if node not in self.revived))

    def _kill(self, view: JobView, *nodes: str) -> None:
        say(f"{' and '.join(nodes)} will be killed, after step {view.step}", "red")
        self.ctl("kill-node", *nodes)
        self.dead += nodes
        self.kills.append(Kill(nodes, view.step, view.checkpoint_step, view.step_s))

    def heal(self) -> None:
        """Start the dead again, for the run without failures."""
        while self.dead:
            self.ctl("start-node", self.dead.pop())

    # ------------------------------------------------------------------- watching

    def tell_incidents(self) -> bool:
        """Print incidents that have closed since the last look; whether one is open."""
        incidents = [incident for incident in self.client.incidents() if incident.job == self.job]
        for incident in incidents:
            if not incident.open and incident.id not in self.told:
                self.told[incident.id] = incident
                say(recovered(incident), "green")
        return any(incident.open for incident in incidents)

    def tell_returned(self, view: JobView) -> None:
        """Print who trains again."""
        for node in self.revived:
            if node in view.nodes and node not in self.returned:
                self.returned.add(node)
                say(f"  {node} trains again, after step {view.step}", "green")

    def train(self) -> JobView:
        """Watch the job to its end, and do to it what is planned, each at its share of the steps."""
        acts: list[tuple[float, Callable[[JobView], None]]] = [
            (0.2, self.kill_two), (0.45, self.bring_one_back), (0.7, self.kill_another),
        ]  # fmt: skip
        with shown() as on_screen:
            while True:
                view = self.client.job(self.job)
                on_screen.show(view)
                self.tell_returned(view)
                quiet = not self.tell_incidents() and view.state == "running"
                if quiet and acts and view.step >= acts[0][0] * view.steps:
                    acts.pop(0)[1](view)
                if view.state in {"done", "failed", "cancelled"}:
                    break
                time.sleep(LOOK_EVERY_S)
        if view.state != "done":
            raise DemoFailed(f"the job is {view.state}: {view.reason}")
        if acts or len(self.told) < len(self.kills):
            raise DemoFailed("the job was over before everything had happened to it")
        return view

    def verify(self) -> Verdict:
        """Train the job again without failures, and compare. Raises DemoFailed, also where one
        bit differs.
        """
        with shown() as on_screen:

            def show() -> None:
                for view in self.client.jobs():
                    if view.id != self.job:
                        on_screen.show(view)

            found = self.ctl("--output", "json", "verify", self.job, meanwhile=show)
        return msgspec.json.decode(found, type=Verdict)

    def start(self) -> Start:
        """How long it took to start the job here."""
        moved = [
            change for change in self.client.story(f"job:{self.job}") if isinstance(change.data, JobMoved)
        ]
        deployed_at = next(change.at for change in moved if change.data.state == "deploying")
        return Start(self.processes_s, self.client.steps(self.job)[0].at - deployed_at)


def run(demo: Demo) -> None:
    """The whole demo. Raises DemoFailed."""
    demo.stage(
        1, f"start a cluster: a daemon and {NUM_NODES} nodes on this machine, each a process of its own"
    )
    # Whole nodes are killed here: spares would only take CPU from the training.
    began = time.monotonic()
    demo.ctl("up", "--nodes", str(NUM_NODES), "--no-spare")
    demo.processes_s = time.monotonic() - began
    say(f"  up after {demo.processes_s:.1f} s")
    demo.stage(2, "train a small GPT-2 in three pipelines; two nodes are killed, one returns, one is killed")
    demo.job = demo.ctl("submit", str(JOB)).strip()
    view = demo.train()
    demo.stage(3, "train the same job again, without failures, and compare every loss and every weight")
    demo.heal()
    verdict, start = demo.verify(), demo.start()
    incidents = tuple(demo.told.values())
    say(f"\n{proven(verdict, view, demo.kills, incidents)}\n\n{restarts(demo.kills, start, incidents)}")


def _interrupted(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _say_where(demo: Demo) -> None:
    """How to look at a cluster that stays, and how to end it."""
    say(f"\nthe cluster stays: OOBLECK_STATE={demo.state} oobleck-console")
    say(f"to end it: oobleckctl down --state {demo.state}")


def _clean_up(demo: Demo, code: int) -> None:
    """End the cluster. Its folder stays where something went wrong."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the clean-up is not to be cut off
    subprocess.run(
        [Path(sys.executable).with_name("oobleckctl"), "down", "--state", demo.state],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if code != 1:
        shutil.rmtree(demo.state, ignore_errors=True)


def main() -> int:
    """Run the demo and clean up, whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keep", action="store_true", help="leave the cluster running where all went well")
    parser.add_argument("--after", type=int, default=0, metavar="N", help="stages that there were before")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    demo = Demo(Path(tempfile.mkdtemp(prefix="oobleck-demo-")), options.after)
    code = 1
    try:
        run(demo)
        code = 0
    except DemoFailed as failure:
        say(f"error: {failure}\nhint: logs are in {demo.state / 'log'}", "red")
    except KeyboardInterrupt:
        code = 130
    finally:
        if options.keep and code == 0:
            _say_where(demo)
        else:
            _clean_up(demo, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
