"""Processes are found, stopped and ended by descent, whatever sessions they have put themselves into."""

import os
import select
import sys

import pytest

from benchmarks.peers.launch import PeerFailed, Programs, family_of, state_of

FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
line = '{"who":"%d","pid":1,"step":1,"began_at":0,"ended_at":1,"committed":true,"groups":4}\\n' % child.pid
open(os.environ["OOBLECK_BENCH_DIR"] + "/p.1.jsonl", "w").write(line)
time.sleep(600)
"""


def test_the_end_takes_descendants_in_other_sessions_along(tmp_path):
    with Programs(tmp_path) as programs:
        programs.start("parent", [sys.executable, "-c", FAMILY])
        child = programs.until(lambda seen: int(seen[0].who) if seen else None, "a child", 30)
        assert child in family_of([os.getpid()])
        programs.pause()
        assert state_of(child) == "T"
        programs.resume()
        handle = os.pidfd_open(child)
    try:  # the signal is sent when the block ends; the end itself comes when the kernel gets to it
        assert select.select([handle], [], [], 60)[0] == [handle]
    finally:
        os.close(handle)


def test_a_program_that_ends_is_an_error_with_its_last_words(tmp_path):
    with Programs(tmp_path) as programs:
        programs.start("p", [sys.executable, "-c", "raise ValueError('no such corpus')"])
        with pytest.raises(PeerFailed, match="ended with 1: ValueError: no such corpus"):
            programs.until(lambda _seen: None, "a step", 30)
