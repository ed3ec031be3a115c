"""How the kernels see a weight, and whether they are interpreted."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from vamp_kernels.launch import GemmLaunch


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``, set before triton is imported)."""
    return bool(triton.knobs.runtime.interpret)


def weight_operand(weight: torch.Tensor, launch: GemmLaunch) -> Any:
    """``weight`` (``[S, N, K]``), or a descriptor with the slot as a coordinate where the launch wants TMA.

    The copy engine needs 16-byte aligned strides and addresses; a weight without them is read by pointer.
    """
    item = weight.element_size()
    aligned = weight.data_ptr() % 16 == 0 and all(s * item % 16 == 0 for s in weight.stride()[:2])
    if not (launch.tma and aligned):
        return weight
    block = [1, launch.block_n, launch.block_k]
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), block)
