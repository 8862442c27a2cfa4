"""What a link takes of a process's limits, and that links work where descriptors have large numbers."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from oobleckd.host import needs
from tests.helpers.transports import Device, MakeDevice, introduce

LARGE = 1024  # from where select(2) fails


@pytest.fixture
def many_files() -> Iterator[None]:
    """All small numbers are taken."""
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 2 * LARGE:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * LARGE, hard))
    with ExitStack() as stack:
        while stack.enter_context(Path("/dev/null").open("rb")).fileno() < LARGE:
            pass
        yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def talk(a: Device, b: Device) -> None:
    """Both ways, so that all links are there."""
    introduce(a, b)
    a.transport.send("b/0", ("f", 1), [])
    b.transport.send("a/0", ("f", 2), [])
    b.receive(("f", 1))
    a.receive(("f", 2))


def num_entries(of: str) -> int:
    return len(list(Path(f"/proc/self/{of}").iterdir()))


def test_what_a_peer_takes(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    files, tasks = num_entries("fd"), num_entries("task")
    talk(a, b)
    assert num_entries("fd") - files <= 2 * needs.PEER_FILES
    assert num_entries("task") - tasks <= 2 * needs.PEER_TASKS


@pytest.mark.usefixtures("many_files")
def test_links_of_large_numbers(make_device: MakeDevice) -> None:
    a, b = make_device("a/0"), make_device("b/0")
    talk(a, b)
    link = a.transport._known["b/0"].link
    assert link is not None
    assert not link._said_goodbye()
    b.transport.close()
    assert a.lost == []
