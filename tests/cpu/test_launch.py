from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vamp_kernels.arguments import MoeArguments, specialised_misfit, weights_misfit
from vamp_kernels.fused_moe import fused_moe
from vamp_kernels.launch import (
    DeviceLimits,
    GemmLaunch,
    GemvLaunch,
    MoeLaunch,
    SpecialisedLaunch,
    check_launch,
    check_specialised,
    choose_launch,
    fit,
    warm_sizes,
)

DEVICES = {
    "H100, H200": DeviceLimits(232448, 132, (9, 0), specialised=True),
    "H200, older Triton": DeviceLimits(232448, 132, (9, 0)),
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


FP8 = torch.float8_e4m3fn


def choose(
    tokens: int,
    shape: tuple[int, int, int, int],
    limits: DeviceLimits,
    dtype: torch.dtype = torch.bfloat16,
) -> MoeLaunch:
    return choose_launch(tokens, *shape, dtype, limits)


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
        assert not isinstance(launch.down, GemvLaunch)
        check_launch(launch, torch.bfloat16)
        check_specialised(launch, *shape[:2], limits)
        for gemm, rows in ((launch.gate_up, 2 * launch.gate_up.block_n), (launch.down, launch.down.block_n)):
            assert gemm.shared_bytes(rows, 2) <= limits.shared_bytes
            if isinstance(gemm, GemmLaunch):
                assert gemm.tma == (limits.capability >= (9, 0))
                assert gemm.small_m < gemm.block_m


@pytest.mark.parametrize("device", [name for name in DEVICES if name != "A100"])
@pytest.mark.parametrize("shape", ["Qwen3-Next TP1", "Qwen3-Next TP4", "Qwen3-30B", "DeepSeek-V3", "Mixtral"])
def test_fp8_launches_fit_the_device_and_the_blocks_of_scales(shape: str, device: str) -> None:
    limits = DEVICES[device]
    for tokens in [2**i for i in range(15)]:
        launch = choose(tokens, SHAPES[shape], limits, FP8)
        if isinstance(launch.gate_up, GemvLaunch):
            assert isinstance(launch.down, GemvLaunch)
            assert launch.gate_up.block_k % 128 == launch.down.block_k % 128 == 0
            continue
        assert isinstance(launch.down, GemmLaunch) and launch.gate_up.block_m % launch.down.block_m == 0
        assert launch.gate_up.block_n == 128 and launch.down.block_n <= 128
        for gemm, rows in ((launch.gate_up, 2 * launch.gate_up.block_n), (launch.down, launch.down.block_n)):
            assert gemm.block_k == 128 and gemm.shared_bytes(rows, 1) <= limits.shared_bytes


@pytest.mark.parametrize("tokens", [1, 64])
def test_fp8_needs_a_device_that_multiplies_it(tokens: int) -> None:
    with pytest.raises(ValueError, match=r"^w13 is torch.float8_e4m3fn, .* capability 8.0: fp8 needs 8.9"):
        choose(tokens, SHAPES["Qwen3-Next TP1"], DEVICES["A100"], FP8)


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    heights = []
    for tokens in (16, 256, 1024, 2048, 8192):
        gate_up = choose(tokens, SHAPES["Qwen3-Next TP1"], DEVICES["H200, older Triton"]).gate_up
        assert isinstance(gate_up, GemmLaunch)
        heights.append(gate_up.block_m)
    assert heights == [16, 16, 32, 64, 128]


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_down_multiplies_whole_tiles_or_parts_of_them(rows: int) -> None:
    gemm = GemmLaunch(64, 128, 64, 4, 2)
    launch = MoeLaunch(gemm, replace(gemm, block_m=rows))
    if rows <= 64:
        return check_launch(launch, torch.bfloat16)
    with pytest.raises(
        ValueError, match="launch has block_m 64 and 128, expected one that the second divides"
    ):
        check_launch(launch, torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"block_m": 0}, "block_m 0, expected a power of two"),
        ({"block_n": -16}, "block_n -16, expected a power of two"),
        ({"block_k": 24}, "block_k 24, expected a power of two"),
        ({"small_m": 12}, "small_m 12, expected a power of two"),
        ({"span": -1}, "span -1, expected 1 or more"),
    ],
)
def test_sizes_that_no_kernel_takes_are_named(changes: dict[str, int], says: str) -> None:
    gemm = GemmLaunch(64, 128, 64, 4, 2)
    with pytest.raises(ValueError, match=f"^launch has {says}$"):
        check_launch(MoeLaunch(gemm, replace(gemm, **changes)), torch.bfloat16)  # type: ignore[arg-type]


def test_specialised_down_multiplies_whole_tiles_only() -> None:
    with pytest.raises(ValueError, match="launch has block_m 128 and 64, expected equal ones"):
        check_launch(MoeLaunch(SpecialisedLaunch(128, 128, 4), SpecialisedLaunch(64, 128, 5)), torch.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "shape", "up", "down"),
    [
        (2048, "Qwen3-Next TP1", GemmLaunch, GemmLaunch),
        (4096, "Qwen3-Next TP1", SpecialisedLaunch, SpecialisedLaunch),
        (4096, "Qwen3-Next TP4", SpecialisedLaunch, GemmLaunch),
        (8192, "Qwen3-Next TP4", SpecialisedLaunch, SpecialisedLaunch),
        (8192, "gpt-oss", GemmLaunch, GemmLaunch),
        (8192, "all experts", GemmLaunch, GemmLaunch),
    ],
)
def test_warps_specialise_for_many_rows_and_whole_blocks(
    tokens: int, shape: str, up: type, down: type
) -> None:
    launch = choose(tokens, SHAPES[shape], DEVICES["H100, H200"])
    assert (type(launch.gate_up), type(launch.down)) == (up, down)
    assert choose(tokens, SHAPES[shape], DEVICES["H100, H200"], FP8).gate_up != launch.gate_up


TALL = SpecialisedLaunch(192, 64, 5)


@pytest.mark.parametrize(
    ("launch", "device", "message"),
    [
        (MoeLaunch(TALL, TALL), "B200", "expected compute capability 9.0 and Triton 3.7"),
        (MoeLaunch(TALL, TALL, True), "H100, H200", "specialised and dependent, expected one"),
        (MoeLaunch(TALL, SpecialisedLaunch(64, 64, 5)), "H100, H200", "block_m 64, expected 128 or 192"),
        (
            MoeLaunch(TALL, SpecialisedLaunch(192, 96, 5)),
            "H100, H200",
            "block_n 96 .* divisors of 2048 and 512",
        ),
    ],
)
def test_a_specialised_launch_that_cannot_run_is_refused(
    launch: MoeLaunch, device: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_specialised(launch, 2048, 512, DEVICES[device])


def test_what_cannot_fit_is_refused() -> None:
    gemm = GemmLaunch(128, 256, 64, 8, 4)
    assert fit(gemm, 256, 2, DEVICES["A100"]).num_stages == 3
    with pytest.raises(ValueError, match="needs more than 1024 bytes of shared memory"):
        fit(gemm, 256, 2, DeviceLimits(1024, 1, (9, 0)))


def arguments(**changes: torch.Tensor) -> MoeArguments:
    tensors = {
        "hidden_states": torch.zeros(3, 64, dtype=torch.bfloat16),
        "w13": torch.zeros(2, 128, 64, dtype=torch.bfloat16),
        "w2": torch.zeros(2, 64, 64, dtype=torch.bfloat16),
        **changes,
    }
    ids = torch.zeros(3, 1, dtype=torch.int32)
    out = torch.empty_like(tensors["hidden_states"])
    return MoeArguments(
        **tensors,
        topk_weights=ids.float(),
        topk_ids=ids,
        slot_table=None,
        out=out,
        weight_on_input=False,
        w13_scale=None,
        w2_scale=None,
    )


@pytest.mark.parametrize(
    ("name", "tensor", "what"),
    [
        ("hidden_states", torch.zeros(3, 72, dtype=torch.bfloat16)[:, :64], "multiples of 32"),
        (
            "hidden_states",
            torch.empty_strided((3, 64), (1 << 30, 1), dtype=torch.bfloat16, device="meta"),
            "spans",
        ),
        ("w13", torch.zeros(2, 128, 68, dtype=torch.bfloat16)[:, :, :64], "multiples of 16"),
        ("w2", torch.zeros(2 * 64 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 64, 64), "multiples of 16"),
    ],
)
def test_an_argument_that_keeps_warps_from_specialising_is_named(
    name: str, tensor: torch.Tensor, what: str
) -> None:
    assert specialised_misfit(arguments()) == ""
    given = arguments(**{name: tensor})
    misfit = specialised_misfit(given)
    assert misfit.startswith(f"{name} ") and what in misfit
    assert weights_misfit(given.w13, given.w2) == (misfit if name != "hidden_states" else "")


def test_a_device_without_specialised_kernels_refuses_their_launch() -> None:
    a = arguments()
    with pytest.raises(ValueError, match=r"^launch is specialised, expected compute capability 9.0"):
        fused_moe(a.hidden_states, a.w13, a.w2, a.topk_weights, a.topk_ids, launch=MoeLaunch(TALL, TALL))


def test_a_specialised_launch_is_never_dependent() -> None:
    """Few experts have many rows each at few tokens; ``check_specialised`` refuses the two together."""
    limits = DEVICES["H100, H200"]
    for experts, top_k in ((8, 2), (16, 4), (1, 1)):
        for tokens in (16, 64, 256, 512):
            launch = choose_launch(tokens, 4096, 1024, experts, top_k, torch.bfloat16, limits)
            check_specialised(launch, 4096, 1024, limits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("most", [1, 3, 2048, 2560, 6000])
@pytest.mark.parametrize("shape", ["Qwen3-Next TP1", "Qwen3-Next TP4", "Mixtral"])
def test_what_is_warmed_is_all_that_steps_launch(shape: str, most: int, dtype: torch.dtype) -> None:
    def of(tokens: int) -> MoeLaunch:
        return choose(tokens, SHAPES[shape], DEVICES["H100, H200"], dtype)

    sizes = warm_sizes(most, of)
    assert sizes[0] == most and sizes == sorted(set(sizes), reverse=True)
    assert {of(tokens) for tokens in sizes} == {of(tokens) for tokens in range(1, most + 1)}
