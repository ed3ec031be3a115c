"""The checks of host memory: what the host and the GPUs' NUMA nodes have, and what a model takes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from vamp_integration.doctor.facts import Facts, Gpu, NumaNode
from vamp_integration.doctor.findings import Finding
from vamp_runtime.memory.host_memory import Room

GIB = 2**30
# Engine processes and page cache need room beside the homes.
ROOM_SHARE = 0.8
# An engine has two processes or more that import torch and vLLM: half a GiB each with the CPU build, more
# with CUDA, before they do anything. Less than the second figure does not hold them.
ENGINE_BYTES, LEAST_BYTES = 4 * GIB, GIB
LESS = "lower max_offload_ratio, or give the host more memory"
MORE = "end other processes, or give the host more memory"


@dataclass(frozen=True)
class Needs:
    """What a model asks of this host.

    Attributes:
        name: as the user gave it.
        home_bytes: home pages of one rank; 0 where they are not known.
        room: for the home pages of all ranks of this host; ``None`` where the model's sizes are not known.
        problem: why it cannot be served so; empty where it can.
    """

    name: str
    home_bytes: int = 0
    room: Room | None = None
    problem: str = ""


def check_memory(facts: Facts, needs: Needs | None, ranks: int) -> Iterator[Finding]:
    """Findings for ``ranks`` ranks on this host, of the model in question where there is one."""
    home_bytes = needs.home_bytes if needs is not None else 0
    yield _host(facts, home_bytes * ranks)
    yield from _numa(facts, home_bytes, ranks)
    if needs is not None:
        yield _model(needs, ranks)


def _host(facts: Facts, homes: int) -> Finding:
    host, limit = facts.host, facts.host.cgroup
    text = f"{host.total / GIB:.1f} GiB, {host.available / GIB:.1f} GiB available"
    if limit is None:
        text += ", no cgroup limit"
    else:
        text += f"; the limit of {limit.limit / GIB:.1f} GiB in {limit.path} leaves {limit.room / GIB:.1f}"
    left = (host.available if limit is None else min(host.available, limit.room)) - homes
    if left >= ENGINE_BYTES:
        return Finding("host memory", "ok", text)
    if homes:
        text += f"; home pages take {homes / GIB:.1f}"
    text += ", and an engine's processes need a few GiB" + (" beside them" if homes else "")
    # Free memory proves nothing: on some virtual machines there is more of it as it is touched.
    over_limit = limit is not None and limit.room - homes < LEAST_BYTES
    return Finding("host memory", "problem" if over_limit else "warning", text, LESS if homes else MORE)


def _numa(facts: Facts, home_bytes: int, ranks: int) -> Iterator[Finding]:
    gpu = facts.gpu
    if facts.device == "cpu" or gpu is None or not facts.numa:
        return
    nodes = ranks_by_node(gpu, ranks)
    if not nodes.keys() <= facts.numa.keys():
        alone = len(facts.numa) == 1
        text = "the GPU's driver names no node" + (", and there is only one" if alone else "")
        remedy = "" if alone else "pin the server to the GPU's node with numactl, if you know it"
        yield Finding("NUMA", "ok" if alone else "warning", text, remedy)
    known = sorted(nodes.keys() & facts.numa.keys())
    for number in known:
        of = f"node {number} of {len(facts.numa)}"
        bind = f"start the server with numactl --cpunodebind={','.join(map(str, known))}"
        yield _node(of, facts.numa[number], nodes[number], home_bytes, bind)


def ranks_by_node(gpu: Gpu, ranks: int) -> Counter[int]:
    """How many of ``ranks`` ranks have their GPU on each node: rank i is on GPU i, and one is on ``gpu``."""
    return Counter(gpu.nodes[:ranks] if ranks > 1 else (gpu.numa_node,))


def _node(name: str, node: NumaNode, ranks: int, home_bytes: int, bind: str) -> Finding:
    text = "the GPU is" if ranks == 1 else f"the GPUs of {ranks} ranks are"
    text += f" on {name}, {node.free / GIB:.1f} GiB free there"
    if home_bytes * ranks > node.free:
        whose = "a rank" if ranks == 1 else f"{ranks} ranks"
        text += f", home pages of {whose} take {home_bytes * ranks / GIB:.1f} GiB of it"
        return Finding("NUMA", "warning", text, "free memory on that node, or lower max_offload_ratio")
    if not node.usable:
        return Finding("NUMA", "warning", f"{text}, but this process may not run there", bind)
    return Finding("NUMA", "ok", text)


def _model(needs: Needs, ranks: int) -> Finding:
    if needs.problem:
        text, _, remedy = needs.problem.partition("; ")
        return Finding("model", "problem", text, remedy)
    if needs.room is None:
        text = f"{needs.name}: its configuration does not name the sizes of its experts"
        return Finding("model", "warning", text, "start it: the worker checks with the sizes it has loaded")
    total = needs.home_bytes * ranks
    text = f"{needs.name}: home pages take {total / GIB:.2f} GiB of host memory"
    text += f" ({ranks} ranks)" if ranks > 1 else ""
    text += f"; {needs.room.source}: {needs.room.nbytes / GIB:.2f} GiB"
    if total > ROOM_SHARE * needs.room.nbytes:
        return Finding(
            "model", "warning", text, "leave room for the engine's processes: lower max_offload_ratio"
        )
    return Finding("model", "ok", text)
