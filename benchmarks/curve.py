"""The README's picture: one job trained twice on this machine, with nodes that die and without; both loss
curves in one plot.

    python benchmarks/curve.py                   train both, draw docs/images/loss-with-kills.svg, print JSON
    python benchmarks/curve.py --redraw FILE            draw again from the JSON that a run printed

Seven nodes of one CPU device each and the demo's job with more steps. Ends with 1 where the two runs differ
in one bit of one loss: such a picture is not drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import msgspec
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.cluster import Cluster
from oobleckd.host.jobfile import load_job
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import JobView

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "loss-with-kills.svg"
NUM_NODES = 7
LOOK_EVERY_S = 0.1
INK, RED, BLUE, GREY = "#1f2328", "#cf222e", "#0969da", "#b6c2cf"


def main() -> int:
    """Run or redraw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--redraw", type=Path, metavar="FILE", help="JSON that a run printed")
    parser.add_argument("--steps", type=int, default=180)
    options = parser.parse_args()
    measured = json.loads(options.redraw.read_text()) if options.redraw else measure(options.steps)
    if not options.redraw:
        print(json.dumps(measured))
    if measured["with_kills"] != measured["without"]:
        print("the two runs differ", file=sys.stderr)
        return 1
    draw(measured, PICTURE)
    return 0


def measure(steps: int) -> dict[str, Any]:
    """Train the job with kills, then again on the healed cluster."""
    job = load_job(ROOT / "examples" / "gpt2-stdlib.toml")
    job = msgspec.structs.replace(job, train=msgspec.structs.replace(job.train, steps=steps))
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), NUM_NODES) as cluster:
        disturbed = Disturbed(cluster, job)
        with_kills = disturbed.train()
        disturbed.heal()
        quiet = cluster.submit(msgspec.structs.replace(job, name="without"))
        cluster.in_state(quiet, "done")
        return {
            "with_kills": with_kills,
            "without": losses(cluster, quiet),
            "marks": disturbed.marks,
            "steps_lost": cluster.client.job(disturbed.id).steps_lost,
        }


def losses(cluster: Cluster, job: str) -> list[str]:
    """Bits of the loss of every committed step, in order."""
    return [step.loss_hex for step in cluster.client.steps(job)]


class Disturbed:
    """The job whose nodes die: what happens at which share of its steps, and where it happened."""

    def __init__(self, cluster: Cluster, job: Job) -> None:
        self.cluster, self.steps = cluster, job.train.steps
        self.dead: list[str] = []
        self.marks: list[dict[str, int]] = []
        self.id = cluster.submit(msgspec.structs.replace(job, name="with-kills"))

    def train(self) -> list[str]:
        """Watch the job to its end; each act waits for the recovery from the one before."""
        acts: list[tuple[float, Callable[[JobView], None]]] = [
            (0.15, lambda view: self.kill(view, view.pipelines[0].nodes[0], view.pipelines[-1].nodes[-1])),
            (0.35, lambda view: self.revive(view, 1)),
            (0.5, lambda view: self.kill(view, view.pipelines[-1].nodes[0])),
            (0.65, lambda view: self.revive(view, 2)),
            (0.8, lambda view: self.kill(view, view.pipelines[0].nodes[0], view.pipelines[1].nodes[-1])),
        ]  # fmt: skip
        while (view := self.cluster.client.job(self.id)).state != "done":
            if view.state in {"failed", "cancelled"}:
                raise SystemExit(f"the job is {view.state}: {view.reason}")
            calm = view.state == "running" and not any(it.open for it in self.cluster.client.incidents())
            if acts and calm and view.step >= acts[0][0] * self.steps:
                acts.pop(0)[1](view)
            time.sleep(LOOK_EVERY_S)
        if acts:
            raise SystemExit("the job was over before everything had happened to it")
        return losses(self.cluster, self.id)

    def kill(self, view: JobView, *nodes: str) -> None:
        """SIGKILL of the agents; their devices end with them."""
        for node in nodes:
            self.cluster.kill(node)
        self.dead += nodes
        self._mark(view)

    def revive(self, view: JobView, num: int) -> None:
        """Start some of the dead again."""
        back, self.dead = self.dead[:num], self.dead[num:]
        for node in back:
            self.cluster.start(node)
        self._mark(view)

    def heal(self) -> None:
        """Start all of the dead again, for the run without failures."""
        for node in self.dead:
            self.cluster.start(node)

    def _mark(self, view: JobView) -> None:
        self.marks.append({"step": view.step, "alive": NUM_NODES - len(self.dead)})


def draw(measured: dict[str, Any], to: Path) -> None:
    """Both curves, kills beside them, and below how many nodes were alive. A light card, so that a dark page
    shows it too.
    """
    mpl.rcParams.update({"svg.hashsalt": "oobleck", "font.size": 11})
    values = [[float.fromhex(bits) for bits in measured[run]] for run in ("without", "with_kills")]
    steps = range(1, len(values[0]) + 1)
    marks = [(mark["step"], mark["alive"]) for mark in measured["marks"]]
    before = [NUM_NODES, *(alive for _, alive in marks)]
    kills = [(step, was - now) for was, (step, now) in zip(before, marks, strict=False) if now < was]
    figure = Figure(figsize=(9, 4.3), facecolor="white", layout="constrained")
    loss, alive = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    loss.plot(steps, values[0], color=GREY, linewidth=7, label="run without failures")
    loss.plot(steps, values[1], color=BLUE, linewidth=1.4, label="run with failures")
    for step, num in kills:
        loss.axvline(step, color=RED, linewidth=1.2, linestyle=(0, (4, 2)))
        words = f" {num} node{'s' if num > 1 else ''} killed"
        loss.text(step, max(values[0]), words, color=RED, va="top", size=10)
    loss.set_title(
        f"{len(steps)} steps, {sum(num for _, num in kills)} nodes killed, "
        f"{measured['steps_lost']} steps lost: every loss is the same, bit for bit",
        size=12, loc="left",
    )  # fmt: skip
    loss.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.16, 0.9))
    loss.set_ylabel("training loss")
    levels = [(0, NUM_NODES), *marks, (len(steps), marks[-1][1])]
    x, y = zip(*levels, strict=True)
    alive.step(x, y, where="post", color=INK, linewidth=1.4)
    alive.fill_between(x, y, step="post", color=GREY, alpha=0.5)
    alive.set(ylim=(0, NUM_NODES + 0.9), yticks=(0, NUM_NODES), xlim=(0, len(steps)))
    alive.set(xlabel="step", ylabel="nodes alive")
    for axes in (loss, alive):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(to, metadata={"Date": None} if to.suffix == ".svg" else None)


if __name__ == "__main__":
    sys.exit(main())
