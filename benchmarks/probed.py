"""``oobleckd`` as it is, with a probe of its loop: python -m benchmarks.probed LAGS [flags of oobleckd]

How much later than asked for the loop comes back from a sleep of 20 ms is appended to the file LAGS, as
doubles in seconds.
"""

from __future__ import annotations

import array
import asyncio
import sys
import time
from pathlib import Path

from oobleckd.daemon import app
from oobleckd.daemon.service import Service

PROBE_S = 0.02
_WRITE_EVERY = 100


async def probe(path: Path) -> None:
    """For ever."""
    lags = array.array("d")
    while True:
        due = time.monotonic() + PROBE_S
        await asyncio.sleep(PROBE_S)
        lags.append(time.monotonic() - due)
        if len(lags) == _WRITE_EVERY:
            with path.open("ab") as file:
                lags.tofile(file)
            del lags[:]


def main() -> None:
    """The program."""
    path, start = Path(sys.argv.pop(1)), Service.start

    def started(self: Service) -> asyncio.Task[None]:
        running = start(self)
        probing = asyncio.create_task(probe(path))
        running.add_done_callback(lambda _: probing.cancel())
        return running

    Service.start = started  # type: ignore[method-assign]
    app.main(prog_name="oobleckd")


if __name__ == "__main__":
    main()
