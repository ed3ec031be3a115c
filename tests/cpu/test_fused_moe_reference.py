from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import moe_fp8

from vamp_kernels.fused_moe import fused_moe_torch

pytest.importorskip("triton")  # which the files of the kernels import, where the parts of the reference are


@dataclass(frozen=True)
class Case:
    tokens: int = 7
    experts: int = 5
    top_k: int = 2
    hidden: int = 16
    intermediate: int = 8
    dtype: torch.dtype = torch.float32


CASES = {
    "plain": Case(),
    "one token": Case(tokens=1),
    "no token": Case(tokens=0),
    "top-1": Case(top_k=1),
    "every expert": Case(top_k=5),
    "odd sizes": Case(tokens=11, experts=7, top_k=3, hidden=10, intermediate=5),
    "bf16": Case(dtype=torch.bfloat16),
    "fp16": Case(dtype=torch.float16),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def make(case: Case, seed: int = 0) -> dict[str, Any]:
    """Arguments for ``case``; the last expert stays empty where it can, and one id is padding."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(case.dtype)

    choosable = case.experts - (case.top_k < case.experts)
    order = torch.rand(case.tokens, choosable, generator=g).argsort(dim=1)
    ids = order[:, : case.top_k].to(torch.int32)
    if case.tokens > 1:
        ids[1, 0] = -1
    return {
        "hidden_states": normal(case.tokens, case.hidden),
        "w13": normal(case.experts, 2 * case.intermediate, case.hidden) / math.sqrt(case.hidden),
        "w2": normal(case.experts, case.hidden, case.intermediate) / math.sqrt(case.intermediate),
        "topk_weights": torch.rand(case.tokens, case.top_k, generator=g),
        "topk_ids": ids,
    }


def naive(a: dict[str, Any], on_input: bool = False) -> torch.Tensor:
    """One token, one choice, one neuron at a time, in Python floats."""
    x, w13, w2 = (a[name].double().tolist() for name in ("hidden_states", "w13", "w2"))
    weights, ids = a["topk_weights"].double().tolist(), a["topk_ids"].tolist()
    hidden = a["hidden_states"].shape[1]
    out = [[0.0] * hidden for _ in x]
    for t, row in enumerate(x):
        for weight, expert in zip(weights[t], ids[t], strict=True):
            if expert == -1:
                continue
            scaled = [v * weight for v in row] if on_input else row
            first = [math.fsum(p * q for p, q in zip(neuron, scaled, strict=True)) for neuron in w13[expert]]
            half = len(first) // 2
            act = [g / (1 + math.exp(-g)) * u for g, u in zip(first[:half], first[half:], strict=True)]
            for h in range(hidden):
                y = math.fsum(p * q for p, q in zip(w2[expert][h], act, strict=True))
                out[t][h] += y if on_input else weight * y
    return torch.tensor(out, dtype=torch.float64).reshape(len(x), hidden)


@cases
@pytest.mark.parametrize("on_input", [False, True], ids=["weight on output", "weight on input"])
def test_agrees_with_a_naive_loop(case: Case, on_input: bool) -> None:
    a = make(case)
    got = fused_moe_torch(**a, apply_router_weight_on_input=on_input)
    assert got.dtype == case.dtype and got.shape == a["hidden_states"].shape
    rtol, atol = 2 * torch.finfo(case.dtype).eps, 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(got.double(), naive(a, on_input), rtol=rtol, atol=atol)


@cases
def test_slots_do_not_change_a_bit(case: Case) -> None:
    a = make(case)
    order = torch.randperm(case.experts, generator=torch.Generator().manual_seed(1))
    permuted = {**a, "w13": a["w13"][order], "w2": a["w2"][order]}
    table = torch.empty(case.experts, dtype=torch.int32)
    table[order] = torch.arange(case.experts, dtype=torch.int32)
    assert torch.equal(fused_moe_torch(**permuted, slot_table=table), fused_moe_torch(**a))


@cases
def test_reading_some_experts_through_aliases_does_not_change_a_bit(case: Case) -> None:
    a = make(case)
    away = list(range(0, case.experts, 2))
    aliased = {**a, "w13": torch.cat([a["w13"], a["w13"][away]]), "w2": torch.cat([a["w2"], a["w2"][away]])}
    for name in ("w13", "w2"):
        aliased[name][away] = math.nan
    table = torch.arange(case.experts, dtype=torch.int32)
    table[away] = torch.arange(case.experts, case.experts + len(away), dtype=torch.int32)
    assert torch.equal(fused_moe_torch(**aliased, slot_table=table), fused_moe_torch(**a))


@cases
def test_interleaved_records_give_the_same_bits(case: Case) -> None:
    a = make(case)
    first, second, gap = a["w13"][0].numel(), a["w2"][0].numel(), 24
    slab = torch.full((case.experts, first + second + gap), math.nan, dtype=case.dtype)
    slab[:, :first] = a["w13"].flatten(1)
    slab[:, first : first + second] = a["w2"].flatten(1)
    stride = slab.stride(0)
    w13 = slab.as_strided(a["w13"].shape, (stride, case.hidden, 1))
    w2 = slab.as_strided(a["w2"].shape, (stride, case.intermediate, 1), storage_offset=first)
    assert torch.equal(fused_moe_torch(**{**a, "w13": w13, "w2": w2}), fused_moe_torch(**a))


def test_padding_contributes_nothing_even_where_its_token_is_not_finite() -> None:
    a = make(Case())
    a["topk_ids"][3] = -1
    a["hidden_states"][3] = math.nan
    out = fused_moe_torch(**a)
    assert torch.equal(out[3], torch.zeros_like(out[3]))
    assert out.isfinite().all()


def test_an_expert_chosen_twice_counts_twice() -> None:
    a = make(replace(Case(), tokens=1))
    a["topk_ids"][:] = 2
    once = {**a, "topk_ids": a["topk_ids"][:, :1], "topk_weights": a["topk_weights"].sum(1, keepdim=True)}
    torch.testing.assert_close(fused_moe_torch(**a), fused_moe_torch(**once))


def bad(name: str, change: Any) -> Any:
    return pytest.param(name, change, id=name)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        bad("hidden_states", lambda t: t[0]),
        bad("hidden_states", lambda t: t.double()),
        bad("w13", lambda t: t[:, 1:]),
        bad("w13", lambda t: t[..., 1:]),
        bad("w13", lambda t: t.half()),
        bad("w2", lambda t: t.transpose(1, 2)),
        bad("w2", lambda t: t[1:]),
        bad("w2", lambda t: t.bfloat16()),
        bad("topk_ids", lambda t: t[1:]),
        bad("topk_ids", lambda t: t.float()),
        bad("topk_ids", lambda t: t - 1),
        bad("topk_ids", lambda t: t + 5),
        bad("topk_weights", lambda t: t[:, 1:]),
        bad("topk_weights", lambda t: t.long()),
        bad("slot_table", lambda t: t[None]),
        bad("slot_table", lambda t: t.float()),
        bad("slot_table", lambda t: t + 1),
        bad("slot_table", lambda t: t[:1]),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name: str, change: Any) -> None:
    a = {**make(Case()), "slot_table": torch.arange(5, dtype=torch.int32)}
    assert fused_moe_torch(**a).isfinite().all()
    a[name] = change(a[name])
    # A table that is too short makes the ids too large for it.
    blamed = "topk_ids" if name == "slot_table" and a[name].numel() == 1 else name
    with pytest.raises(ValueError, match=f"^{blamed} "):
        fused_moe_torch(**a)


FP8 = Case(tokens=7, experts=4, top_k=2, hidden=384, intermediate=256, dtype=torch.bfloat16)


@pytest.mark.parametrize("on_input", [False, True], ids=["weight on output", "weight on input"])
def test_fp8_is_the_product_of_dequantised_values(on_input: bool) -> None:
    a = moe_fp8.to_fp8(make(FP8))
    a["hidden_states"][2, :128] = 0
    got, want = fused_moe_torch(**a, apply_router_weight_on_input=on_input), moe_fp8.exact(a, on_input)
    error = (got.double() - want) / want.square().mean().sqrt()
    assert error.square().mean().sqrt() < 4e-3 and error.abs().max() < 4e-2
    scaled = fused_moe_torch(**{**a, "w2_scale": a["w2_scale"] * 2}, apply_router_weight_on_input=on_input)
    assert torch.equal(scaled, got * 2)


def test_fp8_scales_stay_with_the_expert_when_its_slot_changes() -> None:
    a = moe_fp8.to_fp8(make(FP8))
    order = torch.tensor([2, 0, 3, 1])
    moved = {**a, "w13": a["w13"][order], "w2": a["w2"][order], "slot_table": order.argsort()}
    assert torch.equal(fused_moe_torch(**moved), fused_moe_torch(**a))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        bad("w13_scale", lambda t: None),
        bad("w13_scale", lambda t: t[:, 1:]),
        bad("w13_scale", lambda t: t[1:]),
        bad("w13_scale", lambda t: t.double()),
        bad("w2_scale", lambda t: None),
        bad("w2_scale", lambda t: t.transpose(1, 2)),
        bad("w2_scale", lambda t: t.bfloat16()),
        bad("w13", lambda t: t.bfloat16()),
        bad("w2", lambda t: t.to(torch.float8_e5m2)),
    ],
)
def test_an_fp8_argument_that_does_not_fit_is_named(name: str, change: Any) -> None:
    a = moe_fp8.to_fp8(make(FP8))
    a[name] = change(a[name])
    with pytest.raises(ValueError, match=f"^{name} "):
        fused_moe_torch(**a)


def test_fp8_sizes_must_be_whole_blocks() -> None:
    a = moe_fp8.to_fp8(make(FP8))
    a["w13"], a["w2"] = a["w13"][:, :-128], a["w2"][..., :-64]
    with pytest.raises(ValueError, match=r"^w13 .* multiples of 128"):
        fused_moe_torch(**a)
    with pytest.raises(ValueError, match=r"^w13 .* expected torch.bfloat16"):
        fused_moe_torch(**{**a, "w13_scale": None, "w2_scale": None})
