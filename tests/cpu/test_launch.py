from __future__ import annotations

import pytest
import torch

from vamp_kernels.launch import DeviceLimits, GemmLaunch, GemvLaunch, MoeLaunch, choose_launch, fit

DEVICES = {
    "H100, H200": DeviceLimits(232448, 132, (9, 0)),
    "A100": DeviceLimits(166912, 108, (8, 0)),
    "L40S": DeviceLimits(101376, 142, (8, 9)),
    "B200": DeviceLimits(232448, 148, (10, 0)),
}
SHAPES = {
    "Qwen3-Next TP1": (2048, 512, 512, 10),
    "Qwen3-Next TP4": (2048, 128, 512, 10),
    "Qwen3-30B": (2048, 768, 128, 8),
    "DeepSeek-V3": (7168, 2048, 256, 8),
    "Mixtral": (4096, 14336, 8, 2),
    "gpt-oss": (2880, 2880, 32, 4),
    "all experts": (64, 24, 4, 4),
}


def choose(tokens: int, shape: tuple[int, int, int, int], limits: DeviceLimits) -> MoeLaunch:
    return choose_launch(tokens, *shape, torch.bfloat16, limits)


@pytest.mark.parametrize("limits", DEVICES.values(), ids=DEVICES.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_launches_fit_the_device(shape: tuple[int, int, int, int], limits: DeviceLimits) -> None:
    for tokens in [2**i for i in range(15)]:
        launch = choose(tokens, shape, limits)
        assert launch == choose(tokens, shape, limits)
        assert not launch.dependent_launch or limits.capability >= (9, 0)
        if isinstance(launch.gate_up, GemvLaunch):
            assert isinstance(launch.down, GemvLaunch)
            continue
        assert isinstance(launch.down, GemmLaunch) and launch.gate_up.block_m == launch.down.block_m
        for gemm, rows in ((launch.gate_up, 2 * launch.gate_up.block_n), (launch.down, launch.down.block_n)):
            assert gemm.shared_bytes(rows, 2) <= limits.shared_bytes
            assert gemm.tma == (limits.capability >= (9, 0))
            assert gemm.small_m < gemm.block_m


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    heights = []
    for tokens in (16, 256, 1024, 2048, 8192):
        gate_up = choose(tokens, SHAPES["Qwen3-Next TP1"], DEVICES["H100, H200"]).gate_up
        assert isinstance(gate_up, GemmLaunch)
        heights.append(gate_up.block_m)
    assert heights == [16, 16, 32, 64, 128]


def test_what_cannot_fit_is_refused() -> None:
    gemm = GemmLaunch(128, 256, 64, 8, 4)
    assert fit(gemm, 256, 2, DEVICES["A100"]).num_stages == 3
    with pytest.raises(ValueError, match="needs more than 1024 bytes of shared memory"):
        fit(gemm, 256, 2, DeviceLimits(1024, 1, (9, 0)))
