"""The demo: seven nodes on this machine, a small GPT-2, nodes that die, and a comparison to the last bit.

Everything is done by the installed commands, as a user would do it; only the progress bar looks at the API
itself. The cluster lives in a temporary folder. However this ends (also by Ctrl-C or SIGTERM), it ends the
cluster that it started; with ``--keep`` one that came to its end stays, to be looked at. The last line is what
``oobleckctl verify`` found, or with ``--keep`` how to end the cluster.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from oobleckd.client import Client, socket_of
from oobleckd.host.jobfile import load_job
from oobleckd.protocol.api import JobView

JOB = Path(__file__).with_name("gpt2-stdlib.toml")
NUM_NODES = 7
LOOK_EVERY_S = 0.3
console = Console(highlight=False)


def show(data: str) -> None:
    """What a command printed, as it is."""
    console.print(data, end="", markup=False, soft_wrap=True)


class DemoFailed(Exception):
    """Something did not go as it should have; the message says what."""


@dataclass(slots=True)
class Demo:
    """A cluster in ``state``, the job on it, and what is still to be done to it."""

    state: Path
    job: str = ""
    dead: list[str] = field(default_factory=list)
    revived: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    said_step: int = 0
    killed_at: list[tuple[int, int]] = field(default_factory=list)  # at which step how many nodes

    @property
    def client(self) -> Client:
        """The API of the demo's own daemon."""
        return Client(socket_of(self.state))

    def ctl(self, *words: str, quiet: bool = False) -> str:
        """Run ``oobleckctl`` and return its data. Raises DemoFailed."""
        if not quiet:
            console.print(f"[bold]$ oobleckctl {' '.join(words)}[/bold]")
        command = [str(Path(sys.executable).with_name("oobleckctl")), *words]
        environ = {**os.environ, "OOBLECK_STATE": str(self.state)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as running:
            try:
                output, _ = running.communicate()
            except BaseException:
                running.terminate()  # an `up` that is cut off ends what it has started by then
                raise
        if running.returncode:
            raise DemoFailed(f"oobleckctl {words[0]} ended with {running.returncode}{_said(output)}")
        return output

    # ------------------------------------------------------------------- what happens to the cluster

    def kill_two(self, view: JobView) -> None:
        """Two nodes of different pipelines at once: what f = 2 promises to survive."""
        first, last = view.pipelines[0], view.pipelines[-1]
        self._kill(view, first.nodes[0], last.nodes[-1])

    def bring_one_back(self, _view: JobView) -> None:
        """One of the dead starts again and is taken in at a step's boundary."""
        node = self.dead.pop(0)
        self.revived.add(node)
        console.print(f"\n[green]{node} comes back[/green]")
        show(self.ctl("start-node", node))

    def kill_another(self, view: JobView) -> None:
        """One more, of the deepest pipeline, and not the one that has just come back."""
        deepest = max(view.pipelines, key=lambda pipeline: len(pipeline.nodes))
        self._kill(view, next(node for node in deepest.nodes if node not in self.revived))

    def _kill(self, view: JobView, *nodes: str) -> None:
        console.print(f"\n[red]{' and '.join(nodes)} will be killed[/red]")
        self.ctl("kill-node", *nodes)
        self.dead += nodes
        self.killed_at.append((view.step, len(nodes)))

    def heal(self) -> None:
        """Start the dead again, for the run without failures."""
        while self.dead:
            show(self.ctl("start-node", self.dead.pop()))

    # ------------------------------------------------------------------- watching

    def say_step(self, view: JobView) -> None:
        """Where there is no terminal for a bar: a line for every ten steps."""
        if not console.is_terminal and view.step // 10 > self.said_step // 10:
            self.said_step = view.step
            loss = "-" if view.loss is None else f"{view.loss:.3f}"
            console.print(
                f"step {view.step}/{view.steps}  loss {loss}  generation {view.generation}  {view.state}"
            )

    def tell_incidents(self) -> bool:
        """Print incidents that have closed since the last look; whether one is open."""
        incidents = [incident for incident in self.client.incidents() if incident.job == self.job]
        for incident in incidents:
            if not incident.open and incident.id not in self.told:
                self.told.add(incident.id)
                show(self.ctl("describe", "incident", incident.id))
        return any(incident.open for incident in incidents)

    def train(self) -> None:
        """Watch the job to its end, and do to it what is planned, each at its share of the steps."""
        acts: list[tuple[float, Callable[[JobView], None]]] = [
            (0.2, self.kill_two), (0.45, self.bring_one_back), (0.7, self.kill_another),
        ]  # fmt: skip
        with _progress() as progress:
            bar = progress.add_task("", total=None, loss="", speed="", generation="", lose="")
            while True:
                view = self.client.job(self.job)
                _show(progress, bar, view)
                self.say_step(view)
                quiet = not self.tell_incidents() and view.state == "running"
                if quiet and acts and view.step >= acts[0][0] * view.steps:
                    acts.pop(0)[1](view)
                if view.state in {"done", "failed", "cancelled"}:
                    break
                time.sleep(LOOK_EVERY_S)
        if view.state != "done":
            raise DemoFailed(f"the job is {view.state}: {view.reason}")
        if acts or len(self.told) < 2:
            raise DemoFailed("the job was over before everything had happened to it")
        console.print(f"\n{summary(self.killed_at, view)}\n", soft_wrap=True)


def summary(killed_at: list[tuple[int, int]], view: JobView) -> str:
    """What happened, for somebody who sees it for the first time, and what a restart from the checkpoints would have cost."""
    deaths = " and ".join(f"{num} at step {step}" for step, num in killed_at)
    every = load_job(JOB).checkpoint.every
    assert isinstance(every, int)
    again = sum(step % every for step, _ in killed_at)
    return (
        f"done: {view.step} steps. Nodes killed: {deaths}. Steps lost: {view.steps_lost}.\n"
        f"A restart from the last checkpoint (every {every} steps) would have computed some {again} steps again.\n"
        "Next, the same job trains without failures, and every loss and weight of the two runs is compared."
    )


def _said(output: str) -> str:
    lines = output.strip().splitlines()
    return f": {lines[-1]}" if lines else ""


def _progress() -> Progress:
    words = [TextColumn(f"{{task.fields[{name}]}}") for name in ("loss", "speed", "generation", "lose")]
    return Progress(BarColumn(), MofNCompleteColumn(), *words, console=console, refresh_per_second=4)


def _show(progress: Progress, bar: TaskID, view: JobView) -> None:
    progress.update(
        bar,
        total=view.steps,
        completed=view.step,
        loss="" if view.loss is None else f"loss {view.loss:.3f}",
        speed=f"{view.samples_per_s:.1f} samples/s",
        generation=f"generation {view.generation}",
        lose=view.state if view.tolerance < 0 else f"can lose {view.tolerance} of {view.f}",
    )


def run(demo: Demo) -> None:
    """The whole demo. Raises DemoFailed."""
    # Whole nodes are killed here: spares would only take CPU from the training.
    show(demo.ctl("up", "--nodes", str(NUM_NODES), "--no-spare"))
    demo.job = demo.ctl("submit", str(JOB)).strip()
    demo.train()
    show(demo.ctl("get", "incidents"))
    demo.heal()
    # Not through rich: the last line must be verify's own.
    print(demo.ctl("verify", demo.job), end="", flush=True)


def _interrupted(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _say_where(demo: Demo) -> None:
    """How to look at a cluster that stays, and how to end it."""
    console.print(
        f"\nthe cluster stays: OOBLECK_STATE={demo.state} oobleck-console", markup=False, soft_wrap=True
    )
    console.print(f"to end it: oobleckctl down --state {demo.state}", markup=False, soft_wrap=True)


def _clean_up(demo: Demo, code: int) -> None:
    """End the cluster. Its folder stays where something went wrong."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the clean-up is not to be cut off
    subprocess.run(
        [Path(sys.executable).with_name("oobleckctl"), "down", "--state", demo.state],
        stderr=subprocess.DEVNULL,
        check=False,
    )
    if code != 1:
        shutil.rmtree(demo.state, ignore_errors=True)


def main() -> int:
    """Run the demo and clean up, whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--keep", action="store_true", help="leave the cluster running where all went well")
    keep = parser.parse_args().keep
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    demo = Demo(Path(tempfile.mkdtemp(prefix="oobleck-demo-")))
    code = 1
    try:
        run(demo)
        code = 0
    except DemoFailed as failure:
        console.print(f"error: {failure}\nhint: logs are in {demo.state / 'log'}", markup=False)
    except KeyboardInterrupt:
        code = 130
    finally:
        if keep and code == 0:
            _say_where(demo)
        else:
            _clean_up(demo, code)
    return code


if __name__ == "__main__":
    sys.exit(main())
