"""The checkpoint of most tests on a GPU."""

from __future__ import annotations

from pathlib import Path


def write_small(root: Path) -> Path:
    """A checkpoint of Qwen3-Next whose experts are 1.5 MiB: four of them make three granules."""
    from vamp_integration.tiny_model import TinyShape, write_checkpoint

    shape = TinyShape(experts=64, top_k=8, hidden=1024, intermediate=256)
    return write_checkpoint(root / "small", shape=shape)
