"""Tensors over addresses that torch did not allocate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def tensor_at(
    address: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    strides: Sequence[int] | None = None,
    storage_bytes: int | None = None,
) -> torch.Tensor:
    """A tensor over raw memory, made without reading or writing a byte of it.

    Parts of the range may be unbacked as long as no operation reaches them. The tensor owns nothing: the
    caller keeps the reservation for as long as the tensor, or any view of it, lives.

    Args:
        address: of the first element and of the storage; a multiple of the element size.
        shape: elements in each dimension.
        device: ``"cpu"``, or the CUDA device that the addresses belong to.
        strides: elements between neighbours in each dimension, e.g. over records wider than one row.
            Default: contiguous.
        storage_bytes: exact size of the storage. Default: up to the last element.

    Raises:
        ValueError: an argument is out of range, or the storage would not hold the last element.
    """
    if strides is None:
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    if len(strides) != len(shape) or min([*shape, *strides], default=0) < 0:
        raise ValueError(f"shape {tuple(shape)} and strides {tuple(strides)} do not describe a tensor")
    if address <= 0 or address % dtype.itemsize:
        raise ValueError(f"address {address:#x} is not that of a {dtype}")
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    needed = (last + 1) * dtype.itemsize if all(shape) else 0
    nbytes = needed if storage_bytes is None else storage_bytes
    if nbytes < needed:
        raise ValueError(f"storage_bytes={nbytes} is less than the {needed} bytes up to the last element")
    empty = torch.empty(0, dtype=dtype, device=device)
    storage = torch._C._construct_storage_from_data_pointer(address, empty.device, nbytes)
    return empty.set_(storage, 0, tuple(shape), tuple(strides))
