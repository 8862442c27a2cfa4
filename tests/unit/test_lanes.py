"""How ``make test`` shares tests between its processes: clusters one after another, everything else where
there is time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from xdist.remote import Producer

from tests.conftest import ClustersTogether, has_cluster

CLUSTERS = ["tests/host/test_hosts.py::test_a", *(f"tests/loopback/test_gray.py::test_{i}" for i in range(9))]
PROCESSES = [f"tests/loopback/test_agent.py::test_{i}" for i in range(5)]
COMPUTING = [f"tests/unit/test_words.py::test_{i}" for i in range(40)]
SECONDS = dict.fromkeys(CLUSTERS, 6.0) | dict.fromkeys(PROCESSES, 3.0) | dict.fromkeys(COMPUTING, 1.5)


class StubProcess:
    """A process of xdist: runs what it is sent, in that order."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.waiting: list[int] = []
        self.ran: list[str] = []
        self.shutting_down, self.now_s = False, 0.0

    def send_runtest_some(self, indices: list[int]) -> None:
        self.waiting += indices

    def shutdown(self) -> None:
        self.shutting_down = True


@pytest.fixture(params=[1, 2, 3, 4])
def processes(request: pytest.FixtureRequest) -> list[StubProcess]:
    """Some that are through with all tests, each of which took its time."""
    option = SimpleNamespace(loadscopereorder=True, maxfail=0)
    config: Any = SimpleNamespace(option=option, getvalue=lambda _name: [f"{request.param}*popen"])
    scheduler = ClustersTogether(config, Producer("lanes", enabled=False))
    collected = [*CLUSTERS, *PROCESSES, *COMPUTING]
    made: list[Any] = [StubProcess(f"gw{number}") for number in range(request.param)]
    for each in made:
        scheduler.add_node(each)
    for each in made:
        scheduler.add_node_collection(each, collected)
    scheduler.schedule()
    while busy := [process for process in made if process.waiting]:
        process = min(busy, key=lambda each: each.now_s + SECONDS[collected[each.waiting[0]]])
        index = process.waiting.pop(0)
        process.now_s += SECONDS[collected[index]]
        process.ran.append(collected[index])
        scheduler.mark_test_complete(process, index)
    assert scheduler.tests_finished
    assert not scheduler.has_pending
    return made


def test_each_test_runs_once(processes: list[StubProcess]) -> None:
    ran = [name for process in processes for name in process.ran]
    assert sorted(ran) == sorted(SECONDS)


def test_clusters_are_in_one_process_other_processes_in_the_second_and_all_else_computes(
    processes: list[StubProcess],
) -> None:
    first, *others = processes
    assert first.ran[: len(CLUSTERS)] == CLUSTERS
    for second in others[:1]:
        assert second.ran[: len(PROCESSES)] == PROCESSES
    for other in others[1:]:
        assert {*other.ran} <= {*COMPUTING}


def test_all_end_together(processes: list[StubProcess]) -> None:
    ends_s = [process.now_s for process in processes]
    live_s = sum(SECONDS[name] for name in CLUSTERS)
    assert max(ends_s) <= max(min(ends_s) + 3 * SECONDS[COMPUTING[0]], live_s)
    if len(processes) < 3:
        assert {*processes[0].ran} & {*COMPUTING}, "who is through with the clusters helps"


def test_what_starts_nodes_is_known_by_its_text() -> None:
    assert has_cluster("tests/host/test_service.py")
    assert has_cluster("tests/loopback/test_recovery.py")
    assert has_cluster("tests/loopback/test_processes.py"), "by up"
    assert has_cluster("tests/loopback/test_report_web.py"), "where apt is, there is no other"
    assert not has_cluster("tests/loopback/test_agent.py")
