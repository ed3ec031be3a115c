from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vamp_runtime.policy.staging import StagingCosts, staged_from, use_of

# One layer of Qwen3-Next in bf16 on an H200, 24 layers at 84,000 tokens/s.
LAYER = StagingCosts(
    experts=512,
    top_k=10,
    expert_bytes=6 << 20,
    weight_bytes=2,
    hbm_rate=4e12,
    read_rate=51e9,
    copy_rate=53e9,
    compute_rate=779e12,
    token_s=1 / 84_000 / 24,
)
UNIFORM = 10 / 512


def test_costs_by_hand() -> None:
    record = 6 * 2**20
    assert LAYER.moe_s(1) == pytest.approx(10 * record / 4e12)
    assert LAYER.layer_s(8192) == pytest.approx(8192 / 84_000 / 24)
    assert LAYER.direct_s(1, 51, UNIFORM) == pytest.approx(51 * UNIFORM * record / 51e9)
    assert LAYER.staged_s(1, 51, 51, UNIFORM) == pytest.approx(51 * record / 53e9)
    # 4,096 tokens keep the layer busy for 2.0 ms, 0.8 of them its experts: a link that is idle meanwhile
    # costs 1.2 ms.
    saved = LAYER.direct_s(4096, 51, UNIFORM) - LAYER.staged_s(4096, 51, 51, UNIFORM)
    assert 1.2e-3 < saved < 1.6e-3


def test_small_steps_read_in_place_and_large_ones_stage() -> None:
    assert staged_from(LAYER, 51, 51, UNIFORM, 8192) == 256
    assert staged_from(LAYER, 51, 51, UNIFORM / 10, 8192) == 2048


def test_nothing_to_stage_never_pays() -> None:
    assert staged_from(LAYER, 0, 0, UNIFORM, 8192) is None
    assert staged_from(LAYER, 128, 0, UNIFORM, 8192) is None


def test_experts_that_no_token_takes_are_not_copied() -> None:
    assert staged_from(LAYER, 51, 51, 0.0, 8192) is None


@given(
    out=st.integers(1, 256),
    share=st.floats(0, 1),
    use=st.floats(0, 1),
    tokens=st.integers(1, 8192),
    rows=st.sampled_from([0, 16, 64]),
)
def test_what_is_chosen_is_cheaper_at_every_larger_probe(
    out: int, share: float, use: float, tokens: int, rows: int
) -> None:
    staged = round(out * share)
    costs = StagingCosts(**(vars(LAYER) | {"rows_per_read": rows}))
    first = staged_from(costs, out, staged, use, tokens)
    probes = [1 << power for power in range(14) if 1 << power < 2 * tokens]
    pays = [costs.staged_s(t, out, staged, use) < costs.direct_s(t, out, use) for t in probes]
    if first is None:
        assert not staged or not pays[-1]
    else:
        assert all(pay for t, pay in zip(probes, pays, strict=True) if t >= first)


def test_use_is_that_of_the_experts_that_are_out() -> None:
    # 100 tokens, 2 experts each, in two layers of four.
    hits = [[90, 60, 40, 10], [100, 80, 20, 0]]
    assert use_of(hits, [[3], [3]], 2, 4) == pytest.approx(0.05)
    assert use_of(hits, [[0, 1], [0, 1]], 2, 4) == pytest.approx(330 / 400)
    assert use_of([[0] * 4] * 2, [[3], [3]], 2, 4) == use_of(hits, [[], []], 2, 4) == 0.5
