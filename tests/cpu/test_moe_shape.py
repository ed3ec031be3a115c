"""Sizes of the routed experts from the configurations of every family, and the profiles that follow."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vamp_integration.costs import model_profile
from vamp_integration.moe_shape import MoEShape, expert_count, moe_shape
from vamp_integration.plan import check_plan, slab_geometry
from vamp_integration.settings import VampSettings
from vamp_profiles import load_model
from vamp_runtime.errors import ConfigError

# As their published config.json files have them, and what they mean.
PUBLISHED: dict[str, tuple[dict[str, Any], MoEShape]] = {
    "Qwen3-Next-80B-A3B": (
        {
            "num_hidden_layers": 48,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "intermediate_size": 5120,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        MoEShape(48, 48, 512, 10, 2048, 512),
    ),
    "DeepSeek-V3": (
        {
            "num_hidden_layers": 61,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "hidden_size": 7168,
            "moe_intermediate_size": 2048,
            "intermediate_size": 18432,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
        },
        MoEShape(61, 58, 256, 8, 7168, 2048),
    ),
    "GLM-4.5-Air": (
        {
            "num_hidden_layers": 46,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "hidden_size": 4096,
            "moe_intermediate_size": 1408,
            "intermediate_size": 10944,
            "first_k_dense_replace": 1,
        },
        MoEShape(46, 45, 128, 8, 4096, 1408),
    ),
    "Mixtral-8x7B": (
        {
            "num_hidden_layers": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "hidden_size": 4096,
            "intermediate_size": 14336,
        },
        MoEShape(32, 32, 8, 2, 4096, 14336),
    ),
    "OLMoE-1B-7B": (
        {
            "num_hidden_layers": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "hidden_size": 2048,
            "intermediate_size": 1024,
        },
        MoEShape(16, 16, 64, 8, 2048, 1024),
    ),
}


@pytest.mark.parametrize(("fields", "shape"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_configurations(fields: dict[str, Any], shape: MoEShape) -> None:
    assert moe_shape(SimpleNamespace(**fields)) == shape
    assert expert_count(SimpleNamespace(**fields)) == shape.experts


TINY = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden_size": 128,
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("fields", "moe_layers"),
    [
        ({"decoder_sparse_step": 2}, 2),
        ({"mlp_only_layers": [0, 2]}, 2),
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, 1),
        ({"moe_layer_freq": [0, 1, 1, 1]}, 3),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, 3),
        ({"first_k_dense_replace": None, "decoder_sparse_step": None}, 4),
    ],
)
def test_dense_layers_are_not_counted(fields: dict[str, Any], moe_layers: int) -> None:
    shape = moe_shape(SimpleNamespace(**TINY, **fields))
    assert shape is not None and (shape.layers, shape.moe_layers) == (4, moe_layers)


@pytest.mark.parametrize(
    "fields",
    [{"num_experts": None}, {"moe_intermediate_size": [64, 32]}, {"mlp_only_layers": [0, 1, 2, 3]}],
)
def test_what_a_configuration_does_not_name_is_left_open(fields: dict[str, Any]) -> None:
    config = SimpleNamespace(**{**TINY, **fields})
    assert moe_shape(config) is None
    with pytest.raises(
        ConfigError, match=r"^model: auto needs the sizes .*; give the path of a model profile"
    ):
        model_profile(VampSettings(), config)


def test_a_shipped_profile_is_taken_only_for_its_own_experts() -> None:
    fields = PUBLISHED["Qwen3-Next-80B-A3B"][0]
    settings = VampSettings()
    assert model_profile(settings, SimpleNamespace(**fields)).name == "qwen3-next-80b-a3b"
    # Qwen3.5-35B-A3B has half as many, of the same size.
    other = model_profile(settings, SimpleNamespace(**{**fields, "num_experts": 256}), on_cpu=False)
    assert other.name == "scaled from qwen3-next-80b-a3b" and other.experts.value == 256


def test_prefill_is_scaled_by_the_weights_of_a_token() -> None:
    reference = load_model("qwen3-next-80b-a3b")
    fields, shape = PUBLISHED["DeepSeek-V3"]
    profile = model_profile(VampSettings(), SimpleNamespace(**fields), on_cpu=False)
    active = 58 * 8 * 3 * 7168 * 2048 + 61 * 4 * 7168**2
    measured = 24 * (10 * 3 * 2048 * 512 + 4 * 2048**2)
    assert shape.active_parameters == active
    assert profile.prefill_s(61) == pytest.approx(reference.prefill.value * active / measured)
    assert profile.prefill.provenance == "configured" and "qwen3-next" in profile.prefill.source


def test_the_reserve_is_of_the_layers_with_experts(tmp_path: Path) -> None:
    """Three layers of four: a level is 3 pages, so a reserve of one needs twice that and not more."""
    config = {**TINY, "first_k_dense_replace": 1}
    settings = VampSettings(granule_kib=16)
    level = 3 * (2 + 1) * 16384
    check_plan(settings, config, 1, 2 * level)
    with pytest.raises(ConfigError, match=f"give at least {2 * level}$"):
        check_plan(settings, config, 1, 2 * level - 1)
    nested = json.loads(json.dumps({"text_config": config, "vision_config": {"hidden_size": 64}}))
    with pytest.raises(ConfigError, match=f"give at least {2 * level}$"):
        check_plan(settings, nested, 1, 2 * level - 1)


def test_fp8_halves_an_expert() -> None:
    settings = VampSettings(hardware="h200", staging="off")
    config = {**TINY, "hidden_size": 2048, "moe_intermediate_size": 512}
    for quantization, expert_mib in ((None, 6), ("fp8", 3)):
        level = 4 * max(expert_mib, 6) << 20  # two experts of 3 MiB are whole pages
        with pytest.raises(ConfigError, match=f"give at least {2 * level}$"):
            check_plan(settings, config, 1, 1, "cuda", quantization)


# Experts of published models on an H200, MiB of a record with its padding, and experts of a group.
REAL = {
    "GLM-4.5-Air": ((4096, 1408, 2), 34, 1),
    "GLM-4.5": ((5120, 1536, 2), 46, 1),
    "DeepSeek-V2-Lite": ((2048, 1408, 2), 17, 2),
    "DeepSeek-V3 in fp8": ((7168, 2048, 1), 42, 1),
    "Mixtral-8x7B": ((4096, 14336, 2), 336, 1),
    "OLMoE-1B-7B": ((2048, 1024, 2), 12, 1),
    "Qwen3-30B-A3B": ((2048, 768, 2), 9, 2),
    "Qwen3-Next-80B-A3B": ((2048, 512, 2), 6, 1),
}


@pytest.mark.parametrize(("sizes", "record_mib", "group"), REAL.values(), ids=REAL)
def test_experts_of_published_models_have_groups(
    sizes: tuple[int, int, int], record_mib: int, group: int
) -> None:
    hidden, intermediate, width = sizes
    record = 3 * hidden * intermediate * width
    geometry = slab_geometry(VampSettings(staging="off"), 2, 64, (record,), "cuda")
    assert geometry.part_bytes == (record_mib << 20,) and geometry.group == group
    assert geometry.padding_bytes == (record_mib << 20) - record < record // 16
    assert geometry.extra_hbm_bytes == 2 * 64 * geometry.padding_bytes
