"""Every mistake in ``--additional-config '{"vamp": {...}}'`` is one line that says what would work."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest

from vamp_integration.settings import VampSettings, of, parse
from vamp_runtime.errors import ConfigError

NAMES = [field.name for field in dataclasses.fields(VampSettings)]

BAD: dict[str, list[Any]] = {
    "max_offload_ratio": [-0.1, 1.01, math.nan, math.inf, "0.5", True, None, [0.5]],
    "policy": [1, None, True, ["paper"]],
    "hardware": [1, None, {}],
    "model": [0, None, False],
    "granule_kib": [-64, 6, 64.0, "64", True, None],
    "reserve_levels": [-1, 1.0, "1", False, None],
    "host_gib": [-0.5, math.nan, math.inf, "4", True, None],
    "peer_hbm_gib": [-0.5, math.nan, math.inf, "4", True, None],
    "home_refresh_mib": [0, -1, 1.5, "64", True, None],
    "reselect_mib_per_s": [-0.5, math.nan, math.inf, "64", True, None],
    "record_order": [1, None, [[0, 1]], False],
    "restore": [0, 1, "true", None],
    "max_bubble_ms": [0, -1.0, math.nan, math.inf, "30", True, None],
    "prefill_share": [0, -0.5, 1.1, math.nan, "0.5", True, None],
    "max_cordon_s": [0, -1.0, math.nan, math.inf, "30", True, None],
    "moe_kernel": ["triton", "", 1, None, True],
    "staging": ["on", "", 1, None, True],
    "staging_mib": [-1, 1.5, "64", True, None],
    "nvtx": [0, 1, "true", None],
    "exercise_steps": [-1, 2.0, "2", True, None],
}

GOOD: dict[str, list[Any]] = {
    "max_offload_ratio": [0, 0.0, 0.29, 1, 1.0],
    "policy": ["paper", "my/policy.toml"],
    "hardware": ["cpu"],
    "model": ["my/model.toml"],
    "granule_kib": [0, 4, 2048],
    "reserve_levels": [0, 3],
    "host_gib": [0, 0.5, 100],
    "peer_hbm_gib": [0, 0.5, 100],
    "home_refresh_mib": [1, 4096],
    "reselect_mib_per_s": [0, 0.5, 64],
    "record_order": ["", "order.json"],
    "restore": [True, False],
    "max_bubble_ms": [0.1, 60],
    "prefill_share": [0.1, 1, 1.0],
    "max_cordon_s": [0.1, 60],
    "moe_kernel": ["auto", "vllm", "vamp"],
    "staging": ["auto", "off", "region"],
    "staging_mib": [0, 1536],
    "nvtx": [True, False],
    "exercise_steps": [0, 1],
}


def refusal(values: Any) -> str:
    """The message of the ``ConfigError`` that ``parse`` raises: one line."""
    with pytest.raises(ConfigError) as caught:
        parse(values)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_setting_is_tried() -> None:
    assert list(BAD) == list(GOOD) == NAMES


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]])
def test_a_bad_value_is_named_with_one_that_works(name: str, value: Any) -> None:
    message = refusal({name: value})
    found = re.fullmatch(r"(?:additional_config\.vamp\.)?(\w+): (.+); try (.+?)(?: \(.*\))?", message)
    assert found and found[1] == name, message
    shown = (str(value), repr(value))
    assert found[2].startswith(shown), message
    works = ast.literal_eval(found[3])
    assert getattr(parse({name: works}), name) == works


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in GOOD for value in GOOD[name]])
def test_a_good_value_is_taken(name: str, value: Any) -> None:
    assert parse({name: value}) == dataclasses.replace(VampSettings(), **{name: value})


@pytest.mark.parametrize("name", ["max_offload", "Policy", "", "granule-kib"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    message = refusal({"restore": False, name: 1})
    assert message.startswith(f"additional_config.vamp.{name}: unknown setting; known: ")
    assert message.split("known: ", 1)[1].split(", ") == NAMES


def test_the_first_mistake_is_reported() -> None:
    assert "granule_kib" in refusal({"granule_kib": "64", "nonsense": 1})


@pytest.mark.parametrize("values", [3, "paper", ["policy"], None, True])
def test_a_table_is_asked_for(values: Any) -> None:
    message = refusal(values)
    assert message.startswith(f"additional_config.vamp: {values!r} is not a table; try ")
    assert parse(ast.literal_eval(message.split("; try ")[1])) == VampSettings()


def test_nothing_set_means_defaults() -> None:
    assert parse({}) == VampSettings()


@pytest.mark.parametrize(
    ("load_format", "extra", "expected"),
    [
        ("vamp", {"vamp": {"restore": False}}, VampSettings(restore=False)),
        ("vamp", {"other": 1}, VampSettings()),
        ("vamp", {}, VampSettings()),
        ("auto", {"vamp": {"nonsense": 1}}, None),
    ],
)
def test_only_an_engine_with_the_load_format_has_settings(
    load_format: str, extra: Any, expected: VampSettings | None
) -> None:
    load = SimpleNamespace(load_format=load_format)
    config = SimpleNamespace(load_config=load, additional_config=extra, kv_transfer_config=None)
    assert of(config) == expected


@pytest.mark.parametrize(
    ("staging", "connector", "expected"),
    [
        ("auto", None, "auto"),
        ("auto", SimpleNamespace(kv_connector=None), "auto"),
        ("auto", SimpleNamespace(kv_connector="OffloadingConnector"), "off"),
        ("region", SimpleNamespace(kv_connector="OffloadingConnector"), "region"),
    ],
)
def test_beside_kv_offloading_no_hbm_is_kept_for_staging_unless_asked_for(
    staging: str, connector: object, expected: str
) -> None:
    load = SimpleNamespace(load_format="vamp")
    extra = {"vamp": {"staging": staging}}
    config = SimpleNamespace(load_config=load, additional_config=extra, kv_transfer_config=connector)
    chosen = of(config)
    assert chosen is not None and chosen.staging == expected
