"""What every test runs under: one thread per process, no network, and no clock in Hypothesis."""

from __future__ import annotations

import functools
import gc
import os
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from oobleckd.host.standing import standing

# Before anything imports torch or transformers. Started programs inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Torch's compiler writes both into the environment, once it is imported or compiles; and a cluster of another
# environment than the base of all clusters is no fork of it, which takes some seconds more.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# A fault of ours is to be seen where it is.
os.environ["OOBLECK_TRACEBACK"] = "1"
# A user's own cluster must not be what a test talks to.
os.environ.pop("OOBLECK_SOCKET", None)
os.environ.pop("OOBLECK_STATE", None)

settings.register_profile("ours", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ours")


Kind = Literal["clusters", "processes", "computing"]
"""Of tests: with whole clusters; with real processes, but no cluster; and all others."""
_TURNS: tuple[tuple[Kind, ...], ...] = (
    ("clusters", "processes", "computing"),
    ("processes", "computing", "clusters"),
    ("computing", "processes", "clusters"),
)


class ClustersTogether(LoadScopeScheduling):
    """Tests with whole clusters run one after another in one of the processes that ``make test`` starts, the
    files of those with other processes in the second, and what only computes in all others; whoever is
    through first takes of that, one test at a time, so that all end together.

    Where two clusters share the machine, both take more than twice as long; beside what only computes, they
    wait less.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._left: Counter[Kind] = Counter()

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if not file.startswith(_LIVE):
            return nodeid
        return "clusters" if has_cluster(file) else file

    def _assign_work_unit(self, node: WorkerController) -> None:
        """As in the base, of the kind whose turn it is."""
        if self._left.total() != len(self.workqueue):  # at first, and when a process has died
            self._left = Counter(map(_kind_of, self.workqueue))
        turns = _TURNS[min(self.nodes.index(node), len(_TURNS) - 1)]
        kind = next(kind for kind in turns if self._left[kind])
        self._left[kind] -= 1
        self.workqueue.move_to_end(next(s for s in self.workqueue if _kind_of(s) == kind), last=False)
        super()._assign_work_unit(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """As in the base. What a process is through with is forgotten: the base counts all of it again after
        every test, which with ten thousand of them are five seconds.
        """
        super().mark_test_complete(node, item_index, duration)
        work = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(work[scope].values()):
            del work[scope]


_LIVE = ("tests/host/", "tests/loopback/")


def _kind_of(scope: str) -> Kind:
    if scope == "clusters":
        return "clusters"
    return "processes" if scope.startswith(_LIVE) else "computing"


def pytest_runtest_logstart(nodeid: str) -> None:
    """What only computes leaves the processor to those that wait for each other."""
    if "PYTEST_XDIST_WORKER" in os.environ and _kind_of(nodeid) == "computing":
        _give_way()


@functools.cache
def _give_way() -> None:
    os.nice(_NICER_BY)


_NICER_BY = 3  # half of the processor where another one wants it


@functools.cache
def has_cluster(file: str) -> bool:
    """Whether a file of tests starts nodes that train, on booted hosts or by ``up``, or may have apt install
    a browser: a machine has one dpkg, and booted hosts are made of its files.
    """
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    return file.startswith("tests/host/") or any(
        word in text for word in ("Cluster(", '"up"', "helpers.browser")
    )


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end; looking through it again and again for garbage was a
    twentieth of the CPU time of all tests that compute.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of what is marked ``thin(n)``, about one in n is for ``make test``: all others are slow, and
    ``make thorough`` runs them. Random failures of simulated worlds and of the engine are thin(6) where
    nothing else is said.
    """
    kinds: dict[str, list[pytest.Function]] = {}
    for item in items:
        if not isinstance(item, pytest.Function):
            continue
        if is_seeded(item) and not {"thin", "slow"} & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.thin(6))
        if item.get_closest_marker("thin") is not None:
            kinds.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for kind in kinds.values():
        for item in left_out(kind):
            item.add_marker(pytest.mark.slow)


def is_seeded(item: pytest.Function) -> bool:
    """Whether it is one of several runs of a cluster in one process that differ in what a seed draws."""
    callspec = getattr(item, "callspec", None)
    return item.nodeid.startswith(SEEDED) and callspec is not None and "seed" in callspec.params


SEEDED = ("tests/sim/", "tests/unit/worker/test_engine")


def left_out(kind: Sequence[pytest.Function]) -> list[pytest.Function]:
    """One in n is chosen by its name; and some more, so that every value of a parameter occurs, but for those
    of ``seed``, of which at least two do.
    """
    seen: set[tuple[str, str]] = set()
    chosen = 0
    rest = []
    for item in kind:
        if zlib.crc32(item.name.encode()) % item.get_closest_marker("thin").args[0]:
            rest.append(item)
        else:
            chosen += 1
            seen |= _values(item)
    found = []
    for item in rest:
        if _values(item) <= seen and chosen >= LEAST:
            found.append(item)
        else:
            chosen += 1
        seen |= _values(item)
    return found


LEAST = 2
"""Of each kind."""


def _values(item: pytest.Function) -> set[tuple[str, str]]:
    return {(name, repr(value)) for name, value in item.callspec.params.items() if name != "seed"}


@pytest.hookimpl(optionalhook=True)  # without xdist all runs one after another
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ClustersTogether(config, log)


def bare_names(names: Iterable[str]) -> list[str]:
    """Modules that were imported as ``worker``, ``planner`` or ``console``, or below: the root is on sys.path
    under ``python -m pytest``.
    """
    return sorted(name for name in names if name.partition(".")[0] in {"console", "planner", "worker"})


def of_programs() -> set[str]:
    """Of the environment what programs read when they are loaded."""
    return set(standing(os.environ)["environment"].splitlines())


_BEGAN = of_programs()


def left_behind() -> list[str]:
    """What no test may leave in this process, for people."""
    bare = [f"imported by a bare name, not as oobleckd.…: {name}" for name in bare_names(sys.modules)]
    changed = sorted(_BEGAN ^ of_programs())
    return bare + [f"the environment is another one than at first: {each}" for each in changed]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that left something behind fails, wherever it did."""
    found = left_behind()
    if hasattr(session.config, "workeroutput"):  # a process of xdist: the one that started it says so
        session.config.workeroutput["left_behind"] = found
    elif found or (found := sorted(session.config.stash.get(_LEFT, set()))):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.get_terminal_writer().line("\n" + "\n".join(found), red=True)


_LEFT = pytest.StashKey[set[str]]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    """What a process of xdist has left behind."""
    found = getattr(node, "workeroutput", {}).get("left_behind", [])
    node.config.stash.setdefault(_LEFT, set()).update(found)
