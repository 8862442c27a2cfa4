"""A text that changes while it is trained on, on a real cluster, in every way that we know of: not one wrong
loss in what the job ends with.

python benchmarks/changed_text.py 300 steps each; every committed loss is compared with that of a single
process python benchmarks/changed_text.py --only mmap,gone-and-back python benchmarks/changed_text.py --steps
60

Exit code 1 if a loss is wrong, a job does not end, or a reason does not name the file.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tables import table
from oobleckd.ctl import reference
from oobleckd.ctl.waiting import FINAL
from oobleckd.protocol.job import Job
from oobleckd.protocol.jobviews import JobView
from tests.helpers.cluster import Cluster, tiny_job

NODES = 4
EXIT_OF_CHANGED = 7
_HEADER = ("case", "ends", "steps", "wrong losses", "given back", "seconds", "says")


@dataclass
class Case:
    """One job on ``data``, and what happens to it. ``true``: the losses of a single process, by step."""

    cluster: Cluster
    name: str
    data: Path
    steps: int
    true: dict[int, str]
    text: bytes
    spec: Job = field(init=False)
    ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = job_on(self.data, self.name, self.steps)

    @property
    def other(self) -> bytes:
        return self.text.translate(bytes.maketrans(b"abcdefgh", b"ABCDEFGH"))

    def begin(self, resume: str = "") -> str:
        self.ids.append(self.cluster.client.submit(self.spec, resume=resume).id)
        return self.ids[-1]

    def at(self, share: float) -> None:
        self.cluster.at_step(self.ids[-1], int(self.steps * share))

    def replace(self, text: bytes | None = None) -> None:
        made = self.data.with_suffix(".new")
        made.write_bytes(self.other if text is None else text)
        made.replace(self.data)

    def write(self, text: bytes | None = None, *, times_back: bool = False) -> None:
        was = self.data.stat()
        with self.data.open("r+b") as file:
            file.write(self.other if text is None else text)
        if times_back:
            os.utime(self.data, ns=(was.st_atime_ns, was.st_mtime_ns))

    def restart(self, *nodes: str) -> None:
        for node in nodes:
            self.cluster.kill(node, "sigkill")
        for node in nodes:
            self.cluster.ctl("start-node", node)

    def kept_out(self, *nodes: str) -> None:
        def check() -> bool | None:
            views = {view.name: view for view in self.cluster.client.nodes()}
            out = all(views[node].kept_out and str(self.data) in views[node].reason for node in nodes)
            return out or None

        self.cluster.until(check, f"{nodes} kept out with the reason")

    def ended(self) -> JobView:
        def check() -> JobView | None:
            view = self.cluster.client.job(self.ids[-1])
            return view if view.state in FINAL else None

        return self.cluster.until(check, f"the end of {self.ids[-1]}")

    def says(self, what: str) -> None:
        story = self.cluster.ctl("story", self.ids[-1]).stdout
        assert what in story, f"{what!r} is not in the story:\n{story}"

    def fails(self) -> JobView:
        """It has to end with its own exit code, and the reason says what and how far back."""
        view = self.ended()
        done = self.cluster.ctl("wait", view.id, "--for", "state=done", check=False)
        assert (view.state, view.cause, done.returncode) == ("failed", "data-changed", EXIT_OF_CHANGED), (
            view.state, view.reason, done,
        )  # fmt: skip
        assert str(self.data) in view.reason, view.reason
        return view

    def finishes(self) -> JobView:
        view = self.ended()
        assert view.state == "done", f"{view.state}: {view.reason}"
        return view

    def wrong(self) -> tuple[int, int]:
        """(steps, wrong ones) of all that its jobs have ended with."""
        steps = [step for job in self.ids for step in self.cluster.client.steps(job)]
        return len(steps), sum(self.true[step.step] != step.loss_hex for step in steps)


# ---------------------------------------------------------------------- what happens


def replaced(case: Case) -> None:
    """FAULT of the report: the file is replaced, a node is killed and comes back."""
    case.begin()
    case.at(0.2)
    case.replace()
    case.restart("node-1")
    case.kept_out("node-1")
    case.finishes()
    case.says("was replaced")


def written(case: Case) -> None:
    case.begin()
    case.at(0.4)
    case.write()
    view = case.fails()
    assert view.steps_lost > 0, view
    case.replace(case.text)
    case.begin(resume="latest")
    case.finishes()


def written_times_back(case: Case) -> None:
    case.begin()
    case.at(0.4)
    case.write(times_back=True)
    case.fails()
    case.write(case.text)
    case.begin(resume=str(case.cluster.client.job(case.ids[-1]).checkpoint))
    case.finishes()


def mapped(case: Case) -> None:
    case.begin()
    case.at(0.4)
    was = case.data.stat()
    with case.data.open("r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        view[:] = case.other
    os.utime(case.data, ns=(was.st_atime_ns, was.st_mtime_ns))
    case.fails()


def written_and_back(case: Case) -> None:
    """Put back while the job waits for it: it goes on by itself."""
    case.begin()
    case.at(0.4)
    case.write()
    case.cluster.job_in(case.ids[-1], "waiting")
    case.write(case.text)
    view = case.finishes()
    assert view.steps_lost > 0, view


def cut_short(case: Case) -> None:
    """Who reads behind the end of a mapped file is ended by the kernel."""
    case.begin()
    case.at(0.4)
    with case.data.open("r+b") as file:
        file.truncate(4096)
    case.fails()


def grown(case: Case) -> None:
    case.begin()
    case.at(0.2)
    with case.data.open("ab") as file:
        file.write(b"more")
    case.restart("node-2")
    case.kept_out("node-2")
    case.finishes()


def touched(case: Case) -> None:
    case.begin()
    case.at(0.2)
    os.utime(case.data)
    case.restart("node-2")
    view = case.finishes()
    assert view.steps_lost == 0, view


def gone(case: Case) -> None:
    case.begin()
    case.at(0.2)
    case.data.unlink()
    case.restart("node-1")
    case.kept_out("node-1")
    case.finishes()
    case.says("is gone")


def gone_and_back(case: Case) -> None:
    case.begin()
    case.at(0.1)
    case.data.unlink()
    case.restart("node-1")
    case.kept_out("node-1")
    case.data.write_bytes(case.text)
    view = case.finishes()
    case.says(f"node-1 has the text of {view.id}")


def resumed(case: Case) -> None:
    """With another text in the same place it is refused, with the right one it goes on."""
    job = case.begin()
    case.at(0.4)
    case.cluster.client.control(job, "checkpoint")
    case.at(0.5)
    case.cluster.client.control(job, "cancel", discard=True)
    case.ended()
    case.replace()
    case.begin(resume="latest")
    assert "another path" in case.fails().reason
    case.replace(case.text)
    case.begin(resume="latest")
    case.finishes()


def rollback(case: Case) -> None:
    """All copies of a layer are lost while another text lies there; it is put back."""
    case.begin()
    case.at(0.4)
    case.replace()
    nodes = ("node-2", "node-3", "node-4")
    case.restart(*nodes)
    case.kept_out(*nodes)
    case.replace(case.text)
    view = case.finishes()
    assert view.steps_lost > 0, view


def rollback_to_nothing(case: Case) -> None:
    """The same with all nodes, and nobody puts it back."""
    case.begin()
    case.at(0.4)
    case.replace()
    case.restart("node-1", "node-2", "node-3", "node-4")
    assert "the last good checkpoint is" in case.fails().reason


def killed_at_once(case: Case) -> None:
    """Written to, all killed within a moment, put back: nobody is left who could say up to where it was
    right.
    """
    case.begin()
    case.at(0.4)
    case.write()
    for node in ("node-1", "node-2", "node-3", "node-4"):
        case.cluster.kill(node, "sigkill")
    case.write(case.text)
    for node in ("node-1", "node-2", "node-3", "node-4"):
        case.cluster.ctl("start-node", node)
    case.finishes()


def at_the_end(case: Case) -> None:
    """In the last steps: the last checkpoint does not count before all of the text was read once more."""
    case.begin()
    case.at(0.97)
    case.write(times_back=True)
    case.fails()


CASES: dict[str, Callable[[Case], None]] = {
    "replaced": replaced,
    "in-place": written,
    "in-place-times-back": written_times_back,
    "mmap": mapped,
    "in-place-and-back": written_and_back,
    "cut-short": cut_short,
    "grown": grown,
    "touched": touched,
    "gone": gone,
    "gone-and-back": gone_and_back,
    "resume": resumed,
    "rollback": rollback,
    "rollback-to-nothing": rollback_to_nothing,
    "killed-at-once": killed_at_once,
    "at-the-end": at_the_end,
}


# ---------------------------------------------------------------------- the run


def job_on(data: Path, name: str, steps: int) -> Job:
    spec = tiny_job(
        name, train={"steps": steps}, resources={"device_memory": "14MiB"}, checkpoint={"every": 20}
    )
    source = msgspec.structs.replace(spec.data, source="text", path=str(data))
    return msgspec.structs.replace(spec, data=source)


def text_of(seed: int) -> bytes:
    dice = random.Random(seed)
    return bytes(dice.choice(b"abcdefghijklmnopqrstuvwxyz     \n") for _ in range(300_000))


def run(
    cluster: Cluster, name: str, folder: Path, steps: int, true: dict[int, str], text: bytes
) -> list[str]:
    """A row of the table; what went wrong is its last cell, after an exclamation mark."""
    data = folder / f"{name}.txt"
    data.write_bytes(text)
    case, began, said = Case(cluster, name, data, steps, true, text), time.monotonic(), ""
    cluster.heal()
    try:
        CASES[name](case)
    except AssertionError as error:
        said = f"! {error}"
    view = cluster.client.job(case.ids[-1])
    count, wrong = case.wrong()
    given_back = sum(cluster.client.job(job).steps_lost for job in case.ids)
    said = said or (f"! {wrong} wrong" if wrong else view.reason)
    row = [name, view.state, str(count), str(wrong), str(given_back), f"{time.monotonic() - began:.0f}"]
    return [*row, said[:160].replace("\n", " ")]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", default="", help="these cases, with commas")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(CASES)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as made:
        folder, text = Path(made), text_of(1)
        (folder / "reference.txt").write_bytes(text)
        kept = reference.run_single(
            job_on(folder / "reference.txt", "reference", args.steps), folder / "reference-run"
        )
        true = {fact.step: fact.loss_hex for fact in kept.steps}
        with Cluster(folder / "state", NODES) as cluster:
            for name in names:
                with contextlib.suppress(KeyboardInterrupt):
                    rows.append(run(cluster, name, folder, args.steps, true, text))
                    print(" ".join(rows[-1]), flush=True)
    print(table(_HEADER, rows))
    return int(any(row[-1].startswith("!") for row in rows) or len(rows) < len(names))


if __name__ == "__main__":
    sys.exit(main())
