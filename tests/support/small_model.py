"""The checkpoints of most tests on a GPU."""

from __future__ import annotations

from pathlib import Path


def write_small(root: Path) -> Path:
    """A checkpoint of Qwen3-Next whose experts are 1.5 MiB: four of them make three granules."""
    return _write(root / "small", experts=64, top_k=8)


def write_wide(root: Path) -> Path:
    """The same with as many experts as Qwen3-Next has, 3 GiB."""
    return _write(root / "wide", experts=512, top_k=10)


def _write(path: Path, experts: int, top_k: int) -> Path:
    from vamp_integration.tiny_model import TinyShape, write_checkpoint

    shape = TinyShape(experts=experts, top_k=top_k, hidden=1024, intermediate=256)
    return write_checkpoint(path, shape=shape)
