"""Tiny checkpoints of families of models, and what proves that VAMP serves one of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from vamp_integration.tiny_families import FAMILIES
from vamp_integration.tiny_model import TinyShape, write_checkpoint

#: A dense layer comes first.
DENSE_FIRST = {"deepseek-v2", "deepseek-v3", "glm4-moe", "glm4-moe-lite"}


def write_families(root: Path, checkpoints: dict[str, tuple[str, str]], sizes: dict[str, int]) -> Path:
    """A folder for each of ``checkpoints`` (name to family and quantization), with a random record order.

    So what goes by expert and what goes by record is told apart. ``sizes`` are fields of ``TinyShape``.
    """
    draw = random.Random(3)
    for name, (family, quantization) in checkpoints.items():
        layers = 4 if FAMILIES[family].hybrid else 3
        shape = TinyShape(layers=layers, **sizes)
        write_checkpoint(root / name / "model", shape=shape, family=family, quantization=quantization)
        rows = range(layers - (family in DENSE_FIRST))
        order = [draw.sample(range(shape.experts), shape.experts) for _ in rows]
        (root / name / "order.json").write_text(json.dumps({"order": order}))
    return root


def check_proof(run: dict[str, Any]) -> None:
    """Hold the outcome of ``scenarios.families`` for one checkpoint against what proves it."""
    assert "error" not in run, run["error"]
    assert run["failed_moves"] == 0 and run["bytes_moved"] > 0
    assert run["moves"] >= 20, run["moves_by_kind"]
    assert set(run["moves_by_kind"]) == {"offload", "restore"}
    assert all(moved == run["still"] for moved in run["moved"])
    pairs = zip(run["spoilt"], run["still"], strict=True)
    assert any(spoilt["tokens"] != sound["tokens"][: len(spoilt["tokens"])] for spoilt, sound in pairs), (
        "wrong bytes would not be noticed"
    )
