"""Whether the ranges of this process are named for Nsight Systems: its last engine's setting ``nvtx``."""

from __future__ import annotations

import torch

from vamp_integration.settings import VampSettings
from vamp_kernels import ranges


def follow(chosen: VampSettings) -> None:
    """Name them, or not any more. Scheduler and worker both ask, since each may have a process of its own."""
    ranges.install(torch.cuda.nvtx.range if chosen.nvtx else None)
