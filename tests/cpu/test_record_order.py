"""Routing profiles that cannot be used are refused in one line, before any expert is placed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vamp_integration.record_order import read_order
from vamp_runtime.errors import ConfigError

LAYERS, EXPERTS = 2, 4
GOOD = [[3, 1, 0, 2], [0, 1, 2, 3]]


def read(path: Path | str) -> list[list[int]] | None:
    return read_order(str(path), LAYERS, EXPERTS)


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path)
    message = str(caught.value)
    assert message.startswith(f"record_order: {path}: ") and "\n" not in message
    assert message.endswith("; leave it empty to place experts by index")
    return message


def test_no_file_means_by_index() -> None:
    assert read("") is None


def test_other_keys_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "order.json"
    path.write_text(json.dumps({"order": GOOD, "model": "tiny"}))
    assert read(path) == GOOD


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / "none.json")
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (b"", "line 1"),
        (b'{"order": [[0, 1, 2, 3],\n 0 1]}', "line 2"),
        (b'{"order": [[0]]} x', "Extra data"),
        (b'{"order": "\xff"}', "utf-8"),
    ],
)
def test_what_is_no_json_is_refused_with_its_line(tmp_path: Path, content: bytes, hint: str) -> None:
    path = tmp_path / "order.json"
    path.write_bytes(content)
    message = refusal(path)
    assert "cannot be read as a routing profile" in message and hint in message


@pytest.mark.parametrize(
    "profile",
    [
        GOOD,
        "order",
        None,
        {},
        {"Order": GOOD},
        {"order": None},
        {"order": {"0": GOOD[0], "1": GOOD[1]}},
        {"order": []},
        {"order": GOOD[:1]},
        {"order": [*GOOD, GOOD[0]]},
    ],
)
def test_one_permutation_for_each_layer_is_asked_for(tmp_path: Path, profile: Any) -> None:
    path = tmp_path / "order.json"
    path.write_text(json.dumps(profile))
    assert f": order: has not one permutation for each of {LAYERS} MoE layers" in refusal(path)


@pytest.mark.parametrize(
    "row",
    [
        None,
        0,
        "0123",
        [],
        [0, 1, 2],
        [0, 1, 2, 3, 4],
        [0, 1, 2, 2],
        [1, 2, 3, 4],
        [-1, 0, 1, 2],
        ["0", "1", "2", "3"],
        [0.0, 1, 2, 3],
        [False, True, 2, 3],
        [0, 1, 2, None],
        [[0], [1], [2], [3]],
    ],
)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_row_that_is_no_permutation_is_named(tmp_path: Path, layer: int, row: Any) -> None:
    order: list[Any] = list(GOOD)
    order[layer] = row
    path = tmp_path / "order.json"
    path.write_text(json.dumps({"order": order}))
    assert f": order[{layer}] is not a permutation of 0..{EXPERTS - 1}" in refusal(path)
