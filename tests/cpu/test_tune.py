from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from vamp_kernels.launch import (
    FP8,
    DeviceLimits,
    GemmLaunch,
    GemvLaunch,
    MoeLaunch,
    SpecialisedLaunch,
    check_launch,
    choose_launch,
)
from vamp_kernels.launch_search import STAGES, Problem, Tuned, neighbours, search
from vamp_kernels.tune import as_code, main, report, steps_beyond_cache

LIMITS = {
    "H200": DeviceLimits(232448, 132, (9, 0)),
    "H200, Triton 3.7": DeviceLimits(232448, 132, (9, 0), specialised=True),
    "L40S": DeviceLimits(101376, 142, (8, 9)),
}
PROBLEMS = {
    tokens: Problem(tokens, 512, 10, 2048, intermediate, torch.bfloat16)
    for tokens, intermediate in ((1, 128), (64, 512), (2048, 128), (8192, 512))
}


def chosen(problem: Problem, limits: DeviceLimits) -> MoeLaunch:
    shape = (problem.hidden, problem.intermediate, problem.experts, problem.top_k)
    return choose_launch(problem.tokens, *shape, problem.dtype, limits)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
@pytest.mark.parametrize("stage", STAGES)
def test_neighbours_differ_in_one_choice_and_fit(stage: str, problem: Problem, limits: DeviceLimits) -> None:
    launch = chosen(problem, limits)
    found = neighbours(launch, stage, problem, limits)
    assert len(found) == len(set(found)) and launch not in found
    for other in found:
        changed = [name for name in ("gate_up", "down") if getattr(other, name) != getattr(launch, name)]
        if stage != "both":
            assert changed == [stage] and other.dependent_launch == launch.dependent_launch
            before, after = asdict(getattr(launch, stage)), asdict(getattr(other, stage))
            assert sum(before[name] != after[name] for name in before) == 1
        if not isinstance(other.gate_up, GemvLaunch) and not isinstance(other.down, GemvLaunch):
            assert other.gate_up.block_m % other.down.block_m == 0
            assert other.gate_up.shared_bytes(2 * other.gate_up.block_n, 2) <= limits.shared_bytes
            assert other.down.shared_bytes(other.down.block_n, 2) <= limits.shared_bytes
            for gemm in (other.gate_up, other.down):
                assert isinstance(gemm, SpecialisedLaunch) or limits.has_tma or not gemm.tma


def test_every_choice_of_a_gemm_is_varied() -> None:
    problem = PROBLEMS[8192]
    launch = chosen(problem, LIMITS["H200"])
    varied: set[str] = set()
    for stage in STAGES:
        for other in neighbours(launch, stage, problem, LIMITS["H200"]):
            before, after = asdict(launch.down), asdict(other.down)
            varied |= {name for name in before if before[name] != after[name]}
    assert varied >= {"block_m", "block_n", "block_k", "num_warps", "num_stages"}
    assert varied >= {"swap_ab", "tma", "small_m", "span"}


@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_neighbours_in_fp8_keep_to_the_blocks_of_scales(tokens: int) -> None:
    problem = replace(PROBLEMS[tokens], dtype=FP8)
    launch = chosen(problem, LIMITS["H200"])
    found = [other for stage in STAGES for other in neighbours(launch, stage, problem, LIMITS["H200"])]
    assert len(found) > 4
    for other in found:
        check_launch(other, FP8)


def made_up_us(launch: MoeLaunch) -> float | None:
    """Least at gate-up stages of 5 and a down span of 8; does not run without TMA."""
    up, down = launch.gate_up, launch.down
    assert isinstance(up, GemmLaunch) and isinstance(down, GemmLaunch)
    return None if not up.tma or not down.tma else 100 + abs(up.num_stages - 5) * 9 + abs(down.span - 8) * 6


def test_a_search_goes_where_the_time_is_least() -> None:
    problem, limits = PROBLEMS[64], LIMITS["H200"]
    launch = chosen(problem, limits)
    tuned = search(launch, problem, limits, made_up_us, rounds=9)
    assert isinstance(tuned.best.gate_up, GemmLaunch) and isinstance(tuned.best.down, GemmLaunch)
    assert (tuned.best.gate_up.num_stages, tuned.best.down.span) == (5, 8)
    assert tuned.best_us == 100 and tuned.chosen == launch and tuned.failed >= 2
    assert search(launch, problem, limits, lambda launch: 7.0, rounds=9).best == launch
    with pytest.raises(ValueError, match="does not run"):
        search(launch, problem, limits, lambda launch: None, rounds=1)


def test_what_is_printed_makes_the_launch_again() -> None:
    names: dict[str, Any] = {
        "GemmLaunch": GemmLaunch,
        "GemvLaunch": GemvLaunch,
        "SpecialisedLaunch": SpecialisedLaunch,
    }
    for launch in (
        GemvLaunch(4, 512, 2),
        SpecialisedLaunch(192, 64, 5),
        GemmLaunch(64, 128, 64, 8, 4, swap_ab=True, tma=True, span=4),
    ):
        assert eval(as_code(launch), names) == launch
    now = MoeLaunch(GemmLaunch(16, 64, 128, 4, 3), GemmLaunch(16, 128, 128, 4, 2))
    text = report(PROBLEMS[64], Tuned(now, 110.0, replace(now, dependent_launch=True), 100.0, 20, 1))
    assert "64 tokens: chosen 110.0 us, best 100.0 us (10.0 % faster), 20 others timed, 1 left out" in text
    assert "False  ->  True" in text and "GemmLaunch(16, 128, 128, 4, 2)" in text


def test_few_tokens_take_turns_beyond_the_cache() -> None:
    assert steps_beyond_cache(PROBLEMS[1], 60 << 20) == 16
    assert steps_beyond_cache(PROBLEMS[8192], 60 << 20) == 2


SIZES = ["--experts", "2", "--top-k", "1", "--hidden", "16", "--intermediate", "16", "--tokens", "1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "error: no CUDA device; TRITON_INTERPRET=1 interprets"),
        (["--top-k", "3"], "--top-k at most --experts"),
        (["--experts", "1025"], "--experts must be at most 1024, --top-k at most 16"),
        (["--repetitions", "0"], "--repetitions must be 1 or more"),
        (["--dtype", "fp8"], "must be multiples of 128"),
    ],
)
def test_what_cannot_be_timed_is_one_line(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main([*SIZES, *words])
    printed = capsys.readouterr()
    assert end.value.code == 2 and not printed.out and says in printed.err.splitlines()[-1]


def test_the_command_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "vamp_kernels.tune", *SIZES, "--rounds", "1"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("1 tokens: chosen ") and "GemvLaunch(1, 16, 1)" in done.stdout
    assert "the times mean nothing" in done.stderr
