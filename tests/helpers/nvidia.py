"""A machine with NVIDIA GPUs where there is none: a torch that says what it was built with, and a driver's
library that answers as CUDA's does, for processes that are started with the environment of ``Machine``.

The library is compiled here (``cc``), so that what loads it is the real thing: the loader, symbols, codes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

needs_cc = pytest.mark.skipif(
    shutil.which("cc") is None, reason="the stand-in for libcuda needs a C compiler"
)

_CUDA = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static const char *said(const char *name) { const char *value = getenv(name); return value ? value : ""; }
static int number(const char *name) { return atoi(said(name)); }
static int at(const char *name, int index) {           /* the entry of a list such as "0,46" */
    const char *list = said(name);
    while (index-- && (list = strchr(list, ','))) list++;
    return list ? atoi(list) : 0;
}
static int visible(void) {                             /* CUDA's rule: up to the first that does not exist */
    int count = number("STANDIN_GPUS"), found = 0;
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list) return count;
    while (*list) {
        char *end;
        long index = strtol(list, &end, 10);
        if (end == list || index < 0 || index >= count) break;
        found++;
        list = *end == ',' ? end + 1 : end;
    }
    return found;
}
int cuDriverGetVersion(int *version) { *version = number("STANDIN_DRIVER"); return 0; }
int cuInit(unsigned flags) {
    if (number("STANDIN_HANGS")) for (;;) pause();
    if (number("STANDIN_CRASHES")) abort();
    if (number("STANDIN_INIT")) return number("STANDIN_INIT");
    return visible() ? 0 : 100;
}
int cuDeviceGetCount(int *count) { *count = visible(); return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "NVIDIA H100", size); return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 20 ? at("STANDIN_MODES", device) : which == 75 ? 9 : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return at("STANDIN_ERRORS", device); }
int cuDeviceGetPCIBusId(char *bus, int size, int device) { strncpy(bus, "0000:17:00.0", size); return 0; }
int cuGetErrorName(int error, const char **name) {
    *name = error == 214 ? "CUDA_ERROR_ECC_UNCORRECTABLE" : "CUDA_ERROR_OF_THE_STANDIN";
    return 0;
}
"""
_MANAGEMENT = r"""
#include <stdlib.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return 0; }
int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *later) {
    const char *mig = getenv("STANDIN_MIG");
    *now = mig ? atoi(mig) : 0;
    return 0;
}
"""
_LIBRARIES = {"libcuda.so.1": _CUDA, "libnvidia-ml.so.1": _MANAGEMENT}
_TORCH = "__version__ = {version!r}\ncuda = {cuda!r}\nhip = {hip!r}\n"


@dataclass(frozen=True)
class Machine:
    """Two GPUs that CUDA 13.0 can use, unless it is said to be another one. ``visible``:
    CUDA_VISIBLE_DEVICES; ``init``: what CUDA begins with; ``modes`` and ``errors``: of each GPU, its compute
    mode and what its first use gives. ``hip``: what an AMD build of torch says.
    """

    torch: str = "2.13.0+cu130"
    cuda: str | None = "13.0"
    hip: str | None = None
    gpus: int = 2
    driver: int = 13000
    visible: str | None = None
    init: int = 0
    modes: str = ""
    errors: str = ""
    mig: bool = False
    hangs: bool = False
    crashes: bool = False
    library: bool = True

    def but(self, **changes: object) -> Machine:
        """The same, but for some."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def environ(self, folder: Path) -> dict[str, str]:
        """For a process that is to find itself on it; its torch lies in ``folder``."""
        package = folder / "torch"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text('raise ImportError("nobody imports the stand-in for torch")\n')
        said = _TORCH.format(version=self.torch, cuda=self.cuda, hip=self.hip)
        (package / "version.py").write_text(said)
        seen = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return seen | {
            "PYTHONPATH": str(folder),
            "LD_LIBRARY_PATH": str(libraries()) if self.library else "",
            "STANDIN_GPUS": str(self.gpus),
            "STANDIN_DRIVER": str(self.driver),
            "STANDIN_INIT": str(self.init),
            "STANDIN_MODES": self.modes,
            "STANDIN_ERRORS": self.errors,
            "STANDIN_MIG": str(int(self.mig)),
            "STANDIN_HANGS": str(int(self.hangs)),
            "STANDIN_CRASHES": str(int(self.crashes)),
            **({} if self.visible is None else {"CUDA_VISIBLE_DEVICES": self.visible}),
        }


@cache
def libraries() -> Path:
    """A folder with the libraries of the driver."""
    folder = Path(mkdtemp(prefix="standin-nvidia-"))
    for name, source in _LIBRARIES.items():
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(folder / name)],
            input=source,
            text=True,
            check=True,
        )
    return folder
