"""Writes a trace of another project anew in our own format (docs/simulator.md), on standard output.

    python benchmarks/trace_to_csv.py p3-trace.csv > examples/traces/bamboo-p3.csv

Nothing but the format changes: times count from the first instant, in seconds; what joins then is the cluster
as it begins; a removal is a ``fail``, since those files do not tell a crash from a preemption with notice.
The notice of the licence belongs beside what is written (examples/traces/NOTICE).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oobleckd.simulator.traces import TraceError, read_trace, written


def main(words: list[str]) -> int:
    if len(words) != 1:
        print("usage: python benchmarks/trace_to_csv.py FILE", file=sys.stderr)
        return 2
    try:
        print(written(read_trace(Path(words[0]))), end="")
    except TraceError as error:
        print(f"error: {error.problem}\nhint: {error.hint}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
