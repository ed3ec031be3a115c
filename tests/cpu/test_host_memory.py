"""What the system says about host memory, and whether home pages fit into it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from vamp_integration.home_room import check_homes, fitting_ratio
from vamp_integration.settings import VampSettings
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.geometry import SlabGeometry
from vamp_runtime.memory.host_memory import (
    CgroupLimit,
    HostMemory,
    read_host_memory,
    room_for,
    try_allocation,
)

GIB = 1 << 30
MEMINFO = "MemTotal: 33554432 kB\nMemFree: 1048576 kB\nMemAvailable: 8388608 kB\nHugePages_Total: 0"
V2 = {"proc/self/cgroup": "0::/pod/box\n"}
V1 = {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"}


def system(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def group(folder: str, limit: object, usage: int, files: int, v1: bool = False) -> dict[str, str]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    prefix = "total_" if v1 else ""
    stat = f"anon 5\n{prefix}inactive_file {files - 1}\n{prefix}active_file 1\n"
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{usage}\n",
        f"{folder}/memory.stat": stat,
    }


def test_without_a_limit_only_the_kernels_figures_are_there(tmp_path: Path) -> None:
    memory = read_host_memory(system(tmp_path, V2 | group("sys/fs/cgroup/pod/box", "max", 5, 5)))
    assert memory == HostMemory(total=32 * GIB, available=8 * GIB, cgroup=None)


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert read_host_memory(system(tmp_path, {})).cgroup is None


def test_the_tightest_cgroup_counts_and_file_pages_are_no_use(tmp_path: Path) -> None:
    box = group("sys/fs/cgroup/pod/box", 16 * GIB, 6 * GIB, 4 * GIB)
    pod = group("sys/fs/cgroup/pod", 20 * GIB, 15 * GIB, GIB)
    cgroup = read_host_memory(system(tmp_path, V2 | box | pod)).cgroup
    assert cgroup == CgroupLimit("/sys/fs/cgroup/pod/memory.max", 20 * GIB, 14 * GIB)
    assert cgroup is not None and cgroup.room == 6 * GIB


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    unlimited = group(f"{folder}/docker/abc", 9223372036854771712, GIB, 2, v1=True)
    top = group(folder, 4 * GIB, 3 * GIB, GIB, v1=True)
    cgroup = read_host_memory(system(tmp_path, V1 | unlimited | top)).cgroup
    assert cgroup == CgroupLimit(f"/{folder}/memory.limit_in_bytes", 4 * GIB, 2 * GIB)


def test_a_containers_own_view_of_its_limit(tmp_path: Path) -> None:
    """The path in /proc is the host's; only the top of the hierarchy is mounted."""
    cgroup = read_host_memory(system(tmp_path, V2 | group("sys/fs/cgroup", 8 * GIB, GIB, 2))).cgroup
    assert cgroup is not None and cgroup.limit == 8 * GIB


def test_this_machine_can_be_read() -> None:
    memory = read_host_memory()
    assert 0 < memory.available <= memory.total


PLAIN = HostMemory(total=32 * GIB, available=8 * GIB, cgroup=None)
LIMITED = replace(PLAIN, cgroup=CgroupLimit("/memory.max", 6 * GIB, 2 * GIB))


def no_trial(nbytes: int) -> int:
    pytest.fail(f"tried {nbytes}")


def test_a_limit_refuses_and_what_is_there_is_given_without_a_trial() -> None:
    assert room_for(5 * GIB, LIMITED, no_trial).nbytes == 4 * GIB
    assert "6.0 GiB in /memory.max" in room_for(5 * GIB, LIMITED, no_trial).source
    assert room_for(3 * GIB, LIMITED, no_trial).nbytes == 4 * GIB
    assert room_for(5 * GIB, PLAIN, no_trial).nbytes == 8 * GIB


def test_too_little_available_is_only_believed_after_a_trial() -> None:
    """On machines whose memory grows as it is touched, MemTotal says nothing."""
    small = HostMemory(total=GIB, available=GIB, cgroup=None)
    assert room_for(20 * GIB, small, lambda nbytes: nbytes).nbytes == 20 * GIB
    assert room_for(20 * GIB, small, lambda nbytes: 3 * GIB).nbytes == 3 * GIB


def test_a_trial_takes_what_it_is_asked_for_and_stops_where_the_system_does() -> None:
    assert try_allocation((300 << 20) + 5) == (300 << 20) + 5
    assert try_allocation(0) == 0


GEOMETRY = SlabGeometry.plan(24, 512, (6 << 20,), 2 << 20, 0.25)


def test_homes_of_every_rank_have_to_fit() -> None:
    assert GEOMETRY.host_home_bytes == 18 * GIB
    settings = VampSettings()
    roomy = HostMemory(total=64 * GIB, available=40 * GIB, cgroup=None)
    assert check_homes(settings, GEOMETRY, 2, roomy, no_trial).nbytes == 40 * GIB
    tight = replace(roomy, cgroup=CgroupLimit("/memory.max", 32 * GIB, 2 * GIB))
    assert check_homes(settings, GEOMETRY, 1, tight, no_trial).nbytes == 30 * GIB
    with pytest.raises(ConfigError) as caught:
        check_homes(settings, GEOMETRY, 2, tight, no_trial)
    assert str(caught.value) == (
        "max_offload_ratio: 0.25 needs 36.00 GiB of host memory for home pages, and the limit of 32.0 GiB in "
        "/memory.max leaves 30.00 GiB; use 0.2, or give the host more"
    )
    fitting = SlabGeometry.plan(24, 512, (6 << 20,), 2 << 20, 0.2)
    check_homes(VampSettings(max_offload_ratio=0.2), fitting, 2, tight, no_trial)


def test_homes_have_to_fit_beside_kv_offloading() -> None:
    settings = VampSettings()
    host = HostMemory(total=64 * GIB, available=40 * GIB, cgroup=CgroupLimit("/memory.max", 32 * GIB, 0))
    check_homes(settings, GEOMETRY, 1, host, no_trial, beside=14 * GIB)
    with pytest.raises(ConfigError) as caught:
        check_homes(settings, GEOMETRY, 1, host, no_trial, beside=20 * GIB)
    assert str(caught.value) == (
        "max_offload_ratio: 0.25 needs 18.00 GiB of host memory for home pages beside 20.00 GiB of KV "
        "offloading, and the limit of 32.0 GiB in /memory.max leaves 32.00 GiB; use 0.16, a smaller "
        "--kv-offloading-size, or give the host more"
    )
    none = SlabGeometry.plan(24, 512, (6 << 20,), 2 << 20, 0.0)
    check_homes(VampSettings(max_offload_ratio=0.0), none, 1, host, no_trial, beside=50 * GIB)


def test_nothing_is_asked_of_a_host_without_homes() -> None:
    none = SlabGeometry.plan(24, 512, (6 << 20,), 2 << 20, 0.0)
    empty = HostMemory(total=0, available=0, cgroup=CgroupLimit("/memory.max", 0, 0))
    check_homes(VampSettings(max_offload_ratio=0.0), none, 8, empty, no_trial)


@pytest.mark.parametrize("room", [0, GIB, 5 * GIB, 18 * GIB, 1000 * GIB])
def test_the_ratio_that_is_named_fits(room: int) -> None:
    ratio = fitting_ratio(GEOMETRY, room)
    assert 0 <= ratio <= 1
    assert SlabGeometry.plan(24, 512, (6 << 20,), 2 << 20, ratio).host_home_bytes <= room


def test_the_users_own_limit_names_both_ways_out() -> None:
    with pytest.raises(
        ConfigError, match=r"^host_gib: 10 is less than the 18\.00 GiB .* use 18, or"
    ) as caught:
        check_homes(VampSettings(host_gib=10), GEOMETRY, 1, PLAIN, no_trial)
    found = re.search(r"max_offload_ratio (\S+)$", str(caught.value))
    assert (
        found is not None
        and SlabGeometry.plan(24, 512, (6 << 20,), 2 << 20, float(found.group(1))).host_home_bytes <= 10 * GIB
    )
