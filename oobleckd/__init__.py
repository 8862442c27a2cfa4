"""oobleckd: training of large models that keeps going when machines die."""

from pathlib import Path

__version__ = "0.1.0"

# A folder worker/ in the current directory stopped a local cluster, and a package console of the index
# overwrote ours; folders below oobleckd/ alone would hide three parts of the house. (D-service-015)
_LINKED = (
    "console",
    "planner",
    "worker",
)  # folders at the top of the repository, and packages of this one by links
if _missing := [name for name in _LINKED if not Path(__file__).with_name(name).is_dir()]:
    raise ImportError(
        f"{Path(__file__).with_name(_missing[0])} is no folder: this copy of oobleckd comes from a checkout "
        "without symbolic "
        "links (`git config core.symlinks true`, then `git checkout -- oobleckd`)"
    )
