"""Scratch memory that a sequence of calls shares."""

from __future__ import annotations

import math

import torch


class Workspace:
    """Named scratch tensors on one device, allocated at their first use and kept.

    A tensor that has to grow is replaced, but the old one stays alive: a captured CUDA graph may still write
    to it. To hold each only once, make the first call with the largest number of tokens. Its content means
    nothing between calls, but for counters. Calls that share a workspace must run in one stream's order; the
    streams of the workspace are joined to it before a call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._counters: dict[str, torch.Tensor] = {}
        self._tensors: dict[tuple[str, torch.dtype], list[torch.Tensor]] = {}
        self._streams: list[torch.cuda.Stream] = []

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor of ``shape``, uninitialised, the same memory for the same name and dtype."""
        held = self._tensors.setdefault((name, dtype), [])
        size = math.prod(shape)
        if not held or held[-1].numel() < size:
            held.append(torch.empty(size, dtype=dtype, device=self.device))
        return held[-1][:size].view(shape)

    def counter(self, name: str) -> torch.Tensor:
        """An int32 that is zero between calls: who counts with it, resets it."""
        if name not in self._counters:
            self._counters[name] = torch.zeros(1, dtype=torch.int32, device=self.device)
        return self._counters[name]

    def side_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream] | tuple[None, None]:
        """Two streams whose kernels go before others that wait for a processor; None on a CPU."""
        if self.device.type != "cuda":
            return None, None
        if not self._streams:
            self._streams = [
                torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
                for _ in range(2)
            ]
        return self._streams[0], self._streams[1]

    def tensors(self) -> list[torch.Tensor]:
        """All scratch held; counters are not scratch."""
        return [tensor for held in self._tensors.values() for tensor in held]
