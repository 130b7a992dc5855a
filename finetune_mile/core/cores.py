"""How many cores this process may use, and how many training processes share them. No torch here."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores() -> int:
    """The cores of this process's affinity, or fewer where docker, SLURM or systemd set a CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(quota(CGROUPS, OWN_GROUPS))))


def local_processes(world: int) -> int:
    """Training processes on this node, of `world` on all nodes; all of them where the launcher does not say."""
    return max(1, min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world))))


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
