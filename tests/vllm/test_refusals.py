"""Refused options, on configurations that vLLM itself has built and accepted."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vamp_integration import home_room
from vamp_integration.cli import serve
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.host_memory import CgroupLimit, HostMemory

pytestmark = pytest.mark.vllm

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}
MOE = {"num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.fixture(scope="module")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **SIZES, **MOE}
    folder = tmp_path_factory.mktemp("moe")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def build(model: str, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = {"load_format": "vamp", "skip_tokenizer_init": True, "max_model_len": 128, **options}
    return EngineArgs(model=model, **options).create_engine_config()


def assert_refused(caught: pytest.ExceptionInfo[ConfigError], setting: str) -> None:
    message = str(caught.value)
    assert message.startswith(f"{setting}: ") and "\n" not in message
    assert "; " in message, "says what would work"


def test_a_plain_engine_is_accepted(moe_model: str) -> None:
    config = build(moe_model, tensor_parallel_size=1 if torch.cuda.device_count() == 1 else 2)
    assert config.parallel_config.worker_cls.startswith("vamp_integration.")


@pytest.mark.parametrize(
    "inner", ["auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "pt", "dummy"]
)
def test_ordinary_inner_formats_are_accepted(moe_model: str, inner: str) -> None:
    build(moe_model, model_loader_extra_config={"inner": inner})


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ("--enable-expert-parallel", {"enable_expert_parallel": True}),
        ("--pipeline-parallel-size", {"pipeline_parallel_size": 2}),
        ("--data-parallel-size", {"data_parallel_size": 2}),
        ("--enable-lora", {"enable_lora": True}),
        ("--speculative-config", {"speculative_config": NGRAM}),
        ("--weight-transfer-config", {"weight_transfer_config": {"backend": "nccl"}}),
        ("--cpu-offload-gb", {"cpu_offload_gb": 1}),
        ("--offload-group-size", {"offload_group_size": 2}),
        (
            "--kv-transfer-config kv_connector",
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        ),
        ("--attention-backend", {"attention_backend": "FLEX_ATTENTION"}),
        (
            "--attention-backend",
            {"attention_config": {"backend_per_kind": {"full_attention": "FLEX_ATTENTION"}}},
        ),
        ("--moe-backend", {"moe_backend": "marlin"}),
        ("--model-loader-extra-config inner", {"model_loader_extra_config": {"inner": "sharded_state"}}),
    ],
)
def test_an_option_is_refused(moe_model: str, setting: str, options: dict[str, Any]) -> None:
    if options.get("pipeline_parallel_size") == 2 and torch.cuda.device_count() == 1:
        pytest.skip("vLLM refuses it first on one GPU")
    with pytest.raises(ConfigError) as caught:
        build(moe_model, **options)
    assert_refused(caught, setting)


@pytest.mark.parametrize("restore", [True, False])
def test_offloading_connector_is_accepted(moe_model: str, restore: bool) -> None:
    build(
        moe_model,
        kv_transfer_config={"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        additional_config={"vamp": {"model": "tiny-qwen3-next", "restore": restore}},
    )


def test_a_stored_startup_plan_is_refused(moe_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_STARTUP_PLAN", "1")
    with pytest.raises(ConfigError) as caught:
        build(moe_model)
    assert_refused(caught, "VLLM_ENABLE_STARTUP_PLAN")


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("--load-format", lambda c: setattr(c.load_config, "load_format", "auto")),
        (
            "--worker-cls",
            lambda c: setattr(c.parallel_config, "worker_cls", "vllm.v1.worker.cpu_worker.CPUWorker"),
        ),
        ("--scheduler-cls", lambda c: setattr(c.scheduler_config, "scheduler_cls", None)),
        ("--scheduler-cls", lambda c: setattr(c.scheduler_config, "scheduler_cls", SimpleNamespace)),
        ("--model", lambda c: setattr(c.model_config.model_arch_config, "num_experts", 0)),
        ("--enable-elastic-ep", lambda c: setattr(c.parallel_config, "enable_elastic_ep", True)),
        ("--enable-eplb", lambda c: setattr(c.parallel_config, "enable_eplb", True)),
        (
            "--decode-context-parallel-size",
            lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2),
        ),
        (
            "--prefill-context-parallel-size",
            lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2),
        ),
        ("--enable-dbo, --ubatch-size", lambda c: setattr(c.parallel_config, "enable_dbo", True)),
        ("--enable-dbo, --ubatch-size", lambda c: setattr(c.parallel_config, "ubatch_size", 2)),
        ("--enable-sleep-mode", lambda c: setattr(c.model_config, "enable_sleep_mode", True)),
        ("--enable-cumem-allocator", lambda c: setattr(c.model_config, "enable_cumem_allocator", True)),
        (
            "--attention-config hisparse_config",
            lambda c: setattr(c.attention_config, "hisparse_config", object()),
        ),
        (
            "--enable-return-routed-experts",
            lambda c: setattr(c.aux_output_config, "enable_return_routed_experts", True),
        ),
    ],
)
def test_a_finished_configuration_is_refused(
    moe_model: str, setting: str, change: Callable[[Any], None]
) -> None:
    """What VAMP fills in itself, and what the CPU build of vLLM refuses or resets, is altered afterwards."""
    from vamp_integration.refusals import check_engine

    config = copy.deepcopy(build(moe_model))
    check_engine(config)
    change(config)
    with pytest.raises(ConfigError) as caught:
        check_engine(config)
    assert_refused(caught, setting)


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--no-such-option", "1"], "unrecognized arguments: --no-such-option 1"),
        (["--max-model-len", "many"], "argument --max-model-len: invalid"),
        (["--headless"], "--headless: "),
        (["--api-server-count", "2"], "--api-server-count: "),
        (["--load-format", "sharded_state"], "--model-loader-extra-config inner: sharded_state"),
        (["--additional-config", "{"], "--additional-config: '{' is not a JSON object"),
        (["--additional-config.vamp.granule_kib", "5"], "granule_kib: 5 is not a multiple"),
        (
            ["--enable-eplb", "--enable-expert-parallel"],
            "EPLB requires" if torch.cuda.is_available() else "Expert parallelism load balancing is only",
        ),
        (["--gpu-memory-utilization", "2"], "gpu_memory_utilization: 2.0: Input should be less"),
    ],
)
def test_a_command_line_is_refused_in_one_line(moe_model: str, argv: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked([moe_model, "--skip-tokenizer-init", *argv])
    assert str(caught.value).startswith(complaint) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "complaint"), [([], "MODEL is missing"), (["/no/such"], "MODEL: there is no folder")]
)
def test_a_missing_model_is_named(argv: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        checked(argv)


def checked(argv: list[str], **chosen: Any) -> Any:
    args = serve.parse_arguments(argv)
    serve.enable_vamp(args, chosen)
    serve.check_arguments(args)
    return args


def test_a_host_too_small_for_the_homes_is_told_so(moe_model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    full = HostMemory(total=1 << 34, available=1 << 33, cgroup=CgroupLimit("/memory.max", 1 << 30, 1 << 30))
    monkeypatch.setattr(home_room, "read_host_memory", lambda: full)
    with pytest.raises(ConfigError) as caught:
        build(moe_model, additional_config={"vamp": {"max_offload_ratio": 0.5}})
    assert_refused(caught, "max_offload_ratio")
    build(moe_model, additional_config={"vamp": {"max_offload_ratio": 0.0}})


def test_own_options_win_over_additional_config_and_a_load_format_becomes_the_inner_one(
    moe_model: str,
) -> None:
    given = {"other": 1, "vamp": {"max_offload_ratio": 0.1, "granule_kib": 4}}
    argv = [moe_model, "--load-format", "dummy", "--skip-tokenizer-init", "--max-model-len", "128"]
    args = checked([*argv, "--additional-config", json.dumps(given)], max_offload_ratio=0.5)
    assert args.model == moe_model
    assert args.load_format == "vamp"
    assert args.model_loader_extra_config == {"inner": "dummy"}
    assert args.additional_config == {"other": 1, "vamp": {"max_offload_ratio": 0.5, "granule_kib": 4}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU engine compiles")
@pytest.mark.parametrize(
    ("argv", "eager"),
    [([], True), (["--no-enforce-eager"], False), (["-O1"], False), (["-cc.mode=3"], False)],
)
def test_a_cpu_engine_compiles_only_when_asked(moe_model: str, argv: list[str], eager: bool) -> None:
    assert serve.parse_arguments([moe_model, *argv]).enforce_eager is eager
