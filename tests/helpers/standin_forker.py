"""A forker of stand-in devices: the real one, without torch."""

from __future__ import annotations

import sys

from oobleckd.worker.fork import forker
from tests.helpers import standin_device


def main() -> None:
    """The program."""
    forker.main(lambda: None, standin_device.main, (sys.executable, "-m", "tests.helpers.standin_device"))


if __name__ == "__main__":
    main()
