"""Models that VAMP cannot serve are refused by name: by their configuration, or before a weight is read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine import run_scenario
from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.models.registry import ModelRegistry

from vamp_integration import engine_args, model_rules, supported
from vamp_integration.experts import VampRoutedExperts
from vamp_integration.moe_kernel import misfit
from vamp_integration.placement import _scale
from vamp_integration.refusals import check_engine
from vamp_integration.settings import VampSettings
from vamp_integration.tiny_families import FAMILIES
from vamp_runtime.errors import ConfigError

pytestmark = pytest.mark.vllm

ON_CPU = "" if torch.cuda.is_available() else "on a CPU "
BLOCKS = {"weight_block_size": [128, 128]}
COMPRESSED = {"type": "float", "num_bits": 8, "strategy": "block"}


def configured(quantization: str | None, table: Any = None, device: str = "cuda") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            quantization=quantization,
            model_arch_config=SimpleNamespace(quantization_config=table),
        ),
        device_config=SimpleNamespace(device_type=device),
    )


def groups(*weights: dict[str, Any]) -> dict[str, Any]:
    return {"config_groups": {f"group_{i}": {"weights": weight} for i, weight in enumerate(weights)}}


@pytest.mark.parametrize(
    ("quantization", "table"),
    [(None, None), ("fp8", BLOCKS), ("compressed-tensors", groups(COMPRESSED, COMPRESSED))],
)
def test_a_quantization_that_works(quantization: str | None, table: Any) -> None:
    assert supported.refused_quantization(configured(quantization, table)) == ""


@pytest.mark.parametrize(
    ("quantization", "table", "named"),
    [
        ("fp8", {"activation_scheme": "static"}, "fp8 without weight_block_size"),
        ("fp8", None, "fp8 without weight_block_size"),
        ("awq_marlin", {"bits": 4}, "awq_marlin"),
        ("gptq_marlin", {"bits": 4}, "gptq_marlin"),
        ("gpt_oss_mxfp4", {}, "gpt_oss_mxfp4"),
        ("modelopt", BLOCKS, "modelopt"),
        ("online", None, "online"),
        ("fp8_per_block", BLOCKS, "fp8_per_block"),
        (
            "compressed-tensors",
            groups(COMPRESSED, {**COMPRESSED, "strategy": "channel"}),
            "compressed-tensors",
        ),
        ("compressed-tensors", groups({**COMPRESSED, "type": "int", "num_bits": 4}), "compressed-tensors"),
        ("compressed-tensors", {}, "compressed-tensors"),
    ],
)
def test_a_quantization_that_does_not(quantization: str, table: Any, named: str) -> None:
    assert supported.refused_quantization(configured(quantization, table)) == named
    assert (
        supported.refused_quantization(configured(quantization, table, "cpu")) == f"{quantization} on a CPU"
    )


@pytest.fixture(scope="module")
def engine_config(tiny_model: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = {"load_format": "vamp", "skip_tokenizer_init": True, "max_model_len": 128}
    return EngineArgs(model=str(tiny_model), **options).create_engine_config()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "quantization",
            "awq",
            f"--quantization: awq {ON_CPU}does not work with VAMP: it moves experts in bf16",
        ),
        (
            "_architecture",
            "GptOssForCausalLM",
            "--model: GptOssForCausalLM (experts with biases) does not work",
        ),
        ("_architecture", "Llama4ForCausalLM", "--model: Llama4ForCausalLM (router weights on the experts'"),
        (
            "_get_transformers_backend_cls",
            lambda: "Qwen3NextForCausalLM",
            "--model: Qwen3NextForCausalLM through vLLM's Transformers backend does not work with VAMP",
        ),
    ],
)
def test_an_engine_is_refused_in_one_line(engine_config: Any, name: str, value: Any, message: str) -> None:
    check_engine(engine_config)
    config = copy.copy(engine_config)
    config.model_config = copy.copy(engine_config.model_config)
    setattr(config.model_config, name, value)
    with pytest.raises(ConfigError) as caught:
        check_engine(config)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("device", "given", "chosen"),
    [("cuda", "auto", "triton"), ("cuda", "marlin", "marlin"), ("cpu", "auto", "auto")],
)
def test_a_gpu_runs_the_kernel_that_reads_experts_where_they_lie(
    device: str, given: str, chosen: str
) -> None:
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device), kernel_config=SimpleNamespace(moe_backend=given)
    )
    engine_args._choose_experts(config)
    assert config.kernel_config.moe_backend == chosen


def test_names_are_those_of_vllm() -> None:
    known = set(ModelRegistry.get_supported_archs())
    tested = {family.model_class for family in FAMILIES.values()}
    assert tested == supported.TESTED and known >= tested | set(model_rules.REFUSED)
    assert not tested & set(model_rules.REFUSED)


class UnquantizedFusedMoEMethod:
    """Called like vLLM's, whose constructor needs a whole configuration."""

    moe_kernel = None

    def __init__(self, experts_cls: type | None) -> None:
        self.experts_cls = experts_cls


class Fp8MoEMethod(UnquantizedFusedMoEMethod):
    block_quant = True
    weight_block_size = (128, 128)
    moe_block_shape = (128, 128)


class AWQMoEMethod(UnquantizedFusedMoEMethod):
    pass


def layer(cls: type[RoutedExperts] = VampRoutedExperts, **changed: Any) -> Any:
    """Routed experts as vLLM builds them on a CPU, 8 of hidden size 64, before weights are read."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    made: Any = cls.__new__(cls)
    nn.Module.__init__(made)
    made.layer_name, made.local_num_experts, made._expert_map = "model.layers.0.mlp.experts", 8, None
    made.quant_method = UnquantizedFusedMoEMethod(CPUUnquantizedExperts)
    made.moe_config = SimpleNamespace(
        num_experts=8, num_logical_experts=8, experts_per_token=2, has_bias=False, is_act_and_mul=True
    )
    made.expert_map_manager = SimpleNamespace(num_fused_shared_experts=0)
    made.activation, made.swiglu_limit = SimpleNamespace(value="silu"), None
    made.apply_router_weight_on_input, made.e_score_correction_bias = False, None
    made.w13_weight = nn.Parameter(torch.zeros(8, 64, 64, dtype=torch.bfloat16), requires_grad=False)
    made.w2_weight = nn.Parameter(torch.zeros(8, 64, 32, dtype=torch.bfloat16), requires_grad=False)
    for name, value in changed.items():
        if hasattr(made.moe_config, name):
            setattr(made.moe_config, name, value)
        else:
            setattr(made, name, value)
    return made


class SomeModel(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class OwnExperts(RoutedExperts):
    pass


def wider() -> Any:
    return layer(w13_weight=nn.Parameter(torch.zeros(8, 128, 64, dtype=torch.bfloat16), requires_grad=False))


def test_layers_that_can_be_served() -> None:
    supported.check_layers(SomeModel(nn.Linear(2, 2), layer(), layer()), VampSettings())


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (lambda: [layer(has_bias=True)], "its experts have biases"),
        (lambda: [layer(is_act_and_mul=False)], "its experts have no gate"),
        (lambda: [layer(apply_router_weight_on_input=True)], "router weights multiply the experts' input"),
        (lambda: [layer(num_experts=16)], "its experts are spread over ranks"),
        (lambda: [layer(num_logical_experts=6)], "tokens may choose experts without weights, or copies"),
        (
            lambda: [layer(e_score_correction_bias=torch.zeros(10))],
            "tokens may choose experts without weights",
        ),
        (
            lambda: [layer(expert_map_manager=SimpleNamespace(num_fused_shared_experts=1))],
            "shared experts are fused into the routed ones",
        ),
        (lambda: [layer(quant_method=AWQMoEMethod(None))], "its experts are quantized by AWQMoEMethod"),
        (lambda: [layer(), layer(OwnExperts)], "its experts are a class of their own, OwnExperts"),
        (lambda: [layer(), wider()], "its MoE layers differ in shape (2 shapes)"),
    ],
)
def test_layers_that_cannot_are_refused_by_the_models_name(layers: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        supported.check_layers(SomeModel(*layers()), VampSettings())
    message = str(caught.value)
    assert message.startswith(f"model: SomeModel cannot be served: {reason}") and "\n" not in message


def test_another_kernel_is_named() -> None:
    for method in (UnquantizedFusedMoEMethod(nn.Linear), Fp8MoEMethod(nn.Linear)):
        with pytest.raises(
            ConfigError, match=r"^moe_backend: .* runs Linear; VAMP needs vLLM's unquantized CPU"
        ):
            supported.check_layers(SomeModel(layer(quant_method=method)), VampSettings())


def test_scales_refined_to_a_shard_do_not_fit_our_kernel() -> None:
    """vLLM keeps the checkpoint's block size on the layer where it has refined the scales to a finer one."""
    weights = nn.Parameter(torch.zeros(8, 64, 64, dtype=torch.float8_e4m3fn), requires_grad=False)
    made = layer(quant_method=Fp8MoEMethod(None), w13_weight=weights)
    assert misfit(made) == ""
    made.quant_method.moe_block_shape = (64, 64)
    assert misfit(made) == "its fp8 weights have scales of [64, 64]"


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_scales_are_found_under_either_name(suffix: str) -> None:
    scales = torch.rand(8, 1, 1)
    made = layer(**{f"w13_weight{suffix}": nn.Parameter(scales, requires_grad=False)})
    assert torch.equal(_scale(made, "w13_weight"), scales)  # type: ignore[arg-type]
    assert _scale(made, "w2_weight") is None


def test_a_model_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    """The folder has no weights at all, and what is wrong shows only once the layers are built."""
    experts = {"moe_num_experts": 4, "moe_top_k": 2, "ffn_hidden_size": 64}
    config = {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "dtype": "bfloat16",
        **{"d_model": 128, "n_heads": 4, "n_layers": 2, "vocab_size": 256, "max_seq_len": 256},
        "ffn_config": experts,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000},
        "moe_num_experts": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = run_scenario("refused_late", tmp_path, max_model_len=128)
    assert run["message"].startswith(
        "model: DbrxForCausalLM cannot be served: its experts are a class of their own, DbrxExperts; serve it"
    )
