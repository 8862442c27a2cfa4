"""Bad weather in simulated worlds, seed after seed, on every core: the real machine and executor on a virtual
clock.

python benchmarks/soak.py --seeds 5000         from 0 on; one line of what was seen at the end
python benchmarks/soak.py --shared             only of those that draw stages of several devices
python benchmarks/soak.py --seed 17            one seed again; if it fails, what it takes
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers import weather
from tests.helpers.weather import Seen

_SAY_EVERY_S = 30.0
_CHUNK = 4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5000, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--shared", action="store_true", help="with stages of several devices alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at once")
    parser.add_argument("--seed", type=int, help="this one only")
    args = parser.parse_args()
    if args.seed is not None:
        return one(args.seed)
    wanted = filter(shared, itertools.count(args.first)) if args.shared else itertools.count(args.first)
    return many([*itertools.islice(wanted, args.seeds)], args.jobs)


def shared(seed: int) -> bool:
    """Whether it draws stages of several devices."""
    return weather.forecast(seed).devices_per_stage > 1


def one(seed: int) -> int:
    """A seed, and the least that it takes to fail as it does."""
    forecast = weather.forecast(seed)
    print(f"seed {seed}: {forecast}")
    try:
        print(f"  {weather.run(forecast)}")
    except weather.VIOLATIONS as error:
        print(f"  FAILED: {type(error).__name__}: {error}\n  what it takes:")
        for fault in weather.smallest(forecast):
            print(f"    {fault.kind} at {fault.at_s:.3f}")
        raise
    return 0


def many(seeds: Sequence[int], jobs: int) -> int:
    """``seeds`` on ``jobs`` processes; those that fail with what repeats them."""
    began = said = time.monotonic()
    seen, failed, count = Seen(Counter()), 0, 0
    with multiprocessing.Pool(jobs) as pool:
        for seed, found in pool.imap_unordered(attempt, seeds, _CHUNK):
            count += 1
            if isinstance(found, str):
                failed += 1
                print(f"seed {seed}: FAILED {found}\n  again: {weather.command(seed)}", flush=True)
            else:
                seen.add(found)
            if time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                print(f"  {count} of {len(seeds)} seeds, {failed} violations", flush=True)
    print(f"{count} seeds, {failed} violations in {time.monotonic() - began:.0f} s: {seen}")
    return 1 if failed else 0


def attempt(seed: int) -> tuple[int, Seen | str]:
    """A seed, and what was seen, or what was wrong."""
    try:
        return seed, weather.run(weather.forecast(seed))
    except weather.VIOLATIONS as error:
        return seed, f"{type(error).__name__}: {error}".partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
