"""How many cores this process may use, and how many training processes share them. No torch here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BUSY = 0.5  # load of other programs, in cores
CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The cores of this process's affinity, or fewer where docker, SLURM or systemd set a CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(quota(CGROUPS, OWN_GROUPS))))


def local_processes(world: int) -> int:
    """Training processes on this node, of `world` on all nodes; all of them where the launcher does not say."""
    return max(1, min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world))))


def wait_quietly() -> None:
    """Let idle threads of OpenMP sleep where other programs use the cores; call it before torch is imported.

    They spin otherwise, to be there at once. On a machine that is busy with other work they take the time that the
    other threads of the same step need. A machine with idle cores keeps the default, and so does a user's own setting.
    """
    own = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys()
    if own or "torch" in sys.modules or not hasattr(os, "getloadavg"):
        return
    idle = (os.cpu_count() or 1) - os.getloadavg()[0]
    if idle < usable_cores() - BUSY:
        os.environ["OMP_WAIT_POLICY"] = "passive"


def chosen_threads(parent: Path) -> bool:
    """Did the user say the number of OpenMP's threads, rather than the launcher, which sets a number by itself?

    Args:
        parent: the folder of the launcher in /proc, which shows its command and the environment that it began with.
    """
    try:
        environment, command = ((parent / name).read_bytes().split(b"\0") for name in ("environ", "cmdline"))
    except OSError:  # not Linux, or the process of another user
        return False
    words = [word.partition(b"=")[0].replace(b"-", b"_") for word in command]
    return b"__num_cpu_threads_per_process" in words or any(v.startswith(b"OMP_NUM_THREADS=") for v in environment)


def quota(root: Path, own: Path) -> float:
    """The smallest CPU quota, in cores, of a process's cgroup and the groups above it; 1e9 where there is none.

    Args:
        root: where cgroups are mounted.
        own: lists the groups of the process: `0::/a/b` (version 2), `4:cpu,cpuacct:/a/b` (version 1).
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 1e9
    found = [1e9]
    for line in lines:
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers or "cpu" in controllers.split(","):
            base = root / controllers
            own_group = base / path.strip("/")
            found += [_cores(group) for group in (own_group, *own_group.parents) if group.is_relative_to(base)]
    return min(found)


def _cores(group: Path) -> float:
    """The quota of one group, in cores."""
    try:
        if (group / "cpu.max").is_file():
            limit, _, period = (group / "cpu.max").read_text(encoding="utf-8").partition(" ")
        else:
            limit, period = ((group / f"cpu.cfs_{name}_us").read_text(encoding="utf-8") for name in ("quota", "period"))
        return float(limit) / float(period) if limit.strip() != "max" and float(limit) > 0 else 1e9
    except (OSError, ValueError, ZeroDivisionError):
        return 1e9
