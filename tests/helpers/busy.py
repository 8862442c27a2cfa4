"""A daemon that has much to tell: the API over a real socket, of a fleet of any size, with so many changes a
second.

    python -m tests.helpers.busy SOCKET [--nodes 1000] [--rate 200]

For the console's benchmark, in a process of its own. Nine of ten changes say something of a node (it is
silent, it is back, it joined), the others are committed steps, as in a cluster that is shaken and trains on;
every second the newest step's op times are another one's. Owns no state that a request could change.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from oobleckd import __version__
from oobleckd.protocol.changes import Change, NodeHere, StepCommitted
from oobleckd.protocol.jobviews import JobView
from oobleckd.protocol.watch import ImpactView, SampledSteps
from tests.helpers.api_server import Api, serving, status_view
from tests.helpers.fleet import JOB, Fleet, of_nodes

_FIRST_STEP = 19_500
_STEPS_IN_TEN = 1
_KINDS_OF_STEP = 4  # so many different schedules are made, and shown in turn


class BusyApi(Api):
    """Answers of ``fleet``; ``rate`` changes a second go to whoever listens."""

    def __init__(self, fleet: Fleet, rate: float) -> None:
        super().__init__(
            msgspec.structs.replace(status_view(Path("/nowhere")), version=__version__, nodes=fleet.num_nodes)
        )
        self.fleet, self.rate = fleet, rate
        self.began = time.time()
        self.nodes = list(fleet.nodes())
        self.pipelines, self.templates, self.layers = (
            list(fleet.pipelines),
            list(fleet.templates()),
            list(fleet.layers()),
        )
        self.steps = {JOB: list(fleet.steps(_FIRST_STEP, self.began))}
        self._kept = fleet.job(pipelines=fleet.pipelines)
        self._schedules = [fleet.schedule(number, 0.0) for number in range(_KINDS_OF_STEP)]
        self._curve = fleet.curve(_FIRST_STEP)
        self.follow = self.changes_for_ever
        self.watched["goodput"] = fleet.goodput(0.97)

    @property
    def step(self) -> int:
        """The newest step."""
        return _FIRST_STEP + int((time.time() - self.began) * self.rate * _STEPS_IN_TEN / 10)

    @property
    def second(self) -> int:
        """Since the beginning."""
        return int(time.time() - self.began)

    def job(self) -> JobView:
        """It trains."""
        return msgspec.structs.replace(self._kept, step=self.step)

    def read(self, path: str, query: dict[str, list[str]]) -> object:
        """What changes with the time is made when it is asked for."""
        match path.removeprefix("/v1/"):
            case "jobs":
                return [self.job()]
            case "schedules":
                return SampledSteps(JOB, tuple(range(1, self.second + 2)))
            case "schedule":
                made = self._schedules[self.second % _KINDS_OF_STEP]
                return msgspec.structs.replace(made, step=int(query.get("step", ["0"])[0]), at=time.time())
            case "jobs/job-1/curve":
                return msgspec.structs.replace(self._curve, step=self.step)
            case "impact":
                nodes = tuple(query["nodes"][0].split(","))
                return ImpactView(
                    JOB, nodes, (), 0, stops=False, stall_s=1.0, throughput=0.99, copied_bytes=1 << 30,
                    copy_s=0.7, can_lose=9,
                    plan=self.fleet.pipelines, reason="another takes its place",
                )  # fmt: skip
            case _:
                return super().read(path, query)

    def changes_for_ever(self) -> Iterator[Change]:
        """From now on, evenly in time."""
        began = time.monotonic()
        for number in itertools.count(1):
            due = began + number / self.rate
            if (wait_s := due - time.monotonic()) > 0:
                time.sleep(wait_s)
            yield self._change(number)

    def _change(self, number: int) -> Change:
        now = time.time()
        if number % 10 < _STEPS_IN_TEN:
            step = self.step
            data = StepCommitted(JOB, step, self.fleet.loss(step), "applied", 3)
            return Change(number, now, "step", "info", f"{JOB}: step {step} applied", (), data)
        name = self.fleet.names[number * 7 % self.fleet.num_nodes]
        said, level = (("is silent", "warn"), ("is back", "info"), ("joined", "info"))[number % 3]
        return Change(number, now, "node", level, f"{name} {said}", (f"node:{name}",), NodeHere(name))  # type: ignore[arg-type]


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("socket", type=Path)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=200.0)
    args = parser.parse_args()
    with serving(args.socket, BusyApi(of_nodes(args.nodes), args.rate)):
        print("ready", flush=True)
        while True:
            time.sleep(3600.0)


if __name__ == "__main__":
    main()
