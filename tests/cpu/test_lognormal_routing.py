"""Simulated routing: its statistics against recordings of real models, and the kernel against torch."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from vamp_integration.lognormal import NAME, VARIABLE, LogNormal, parse
from vamp_kernels.lognormal_routing import route_lognormal, route_lognormal_torch
from vamp_runtime.errors import ConfigError

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA and not INTERPRET else "cpu"
ROOT = Path(__file__).parents[2]


def logits(tokens: int, experts: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inverse(model: LogNormal, experts: int, layer: int = 0, domain: int = 0) -> torch.Tensor:
    return torch.from_numpy(model.inverse(layer, experts, domain))


def drawn(
    model: LogNormal, tokens: int, experts: int, top_k: int, domain: int = 0, layer: int = 0
) -> torch.Tensor:
    """Ids ``[tokens, top_k]`` of tokens with random hidden states."""
    table, seed = inverse(model, experts, layer, domain), model.hash_seed(layer)
    return route_lognormal_torch(logits(tokens, experts), table, seed, top_k)[1]


def hits(ids: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.bincount(ids.flatten().long(), minlength=experts).double()


def cold_share(counts: torch.Tensor, share: float) -> float:
    """Per cent of the selections that go to the least used ``share`` of the experts."""
    coldest = counts.sort().values[: int(share * len(counts))]
    return float(100 * coldest.sum() / counts.sum())


# Recorded: model, experts, top-k, then the shares of the coldest 5, 15, 25 and 50 per cent.
RECORDED = [
    pytest.param(1.06, 512, 10, (0.2, 1.9, 5.3, 20), id="Qwen 512"),
    pytest.param(0.60, 256, 8, (1.4, 5.5, 10.7, 27), id="DeepSeek decode"),
    pytest.param(0.42, 256, 8, (1.8, 7.2, 13.9, 35), id="GLM mix"),
    pytest.param(1.15, 32, 4, (0.3, 1.8, 4.7, 21), id="gpt-oss"),
]


@pytest.mark.parametrize(("sigma", "experts", "top_k", "shares"), RECORDED)
def test_cold_experts_get_what_recordings_say(
    sigma: float, experts: int, top_k: int, shares: tuple[float, ...]
) -> None:
    """Within 1.5 points up to a quarter of the experts; real tails are fatter, so 6 at a half."""
    counts = hits(drawn(LogNormal(sigma), 10_000, experts, top_k), experts)
    for share, recorded, slack in zip((0.05, 0.15, 0.25, 0.5), shares, (1.5, 1.5, 1.5, 6.5), strict=True):
        assert abs(cold_share(counts, share) - recorded) < slack, share


@pytest.mark.parametrize("sigma", [0.6, 1.06])
def test_the_spread_asked_for_is_the_spread_counted(sigma: float) -> None:
    counts = hits(drawn(LogNormal(sigma), 20_000, 512, 10), 512)
    assert float(counts.clamp(min=0.5).log().std()) == pytest.approx(sigma, rel=0.06)


@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_a_batch_touches_as_many_experts_as_independent_tokens_do(tokens: int) -> None:
    """Recorded at 32 experts, top-4: 11.6, 22.2 and 27.6 for 4, 16 and 64 sequences."""
    ids = drawn(LogNormal(sigma=1.15), 40 * tokens, 32, 4).view(40, -1)
    mean = sum(len(set(row.tolist())) for row in ids) / 40
    assert mean == pytest.approx({4: 11.6, 16: 22.2, 64: 27.6}[tokens], rel=0.08)


def test_sigma_zero_is_uniform() -> None:
    counts = hits(drawn(LogNormal(sigma=0, tilt=0), 20_000, 64, 4), 64)
    chi2 = float(((counts - counts.mean()) ** 2 / counts.mean()).sum())
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)


def test_experts_of_a_token_are_distinct_and_weights_sum_to_one() -> None:
    x = logits(500, 32)
    weights, ids = route_lognormal_torch(x, inverse(LogNormal(), 32), 7, 4)
    assert all(len(set(row)) == 4 for row in ids.tolist()) and int(ids.min()) >= 0 and int(ids.max()) < 32
    assert ids.dtype == torch.int32 and torch.allclose(weights.sum(1), torch.ones(500))
    assert torch.allclose(weights, x.float().gather(1, ids.long()).softmax(1))


def test_equal_tokens_are_routed_alike_wherever_they_stand() -> None:
    x, table = logits(64, 128), inverse(LogNormal(), 128)
    _, ids = route_lognormal_torch(x, table, 7, 8)
    order = torch.randperm(64)
    assert torch.equal(route_lognormal_torch(x[order][:20], table, 7, 8)[1], ids[order][:20])


def test_layers_seeds_and_tokens_differ() -> None:
    """The experts that two draws have in common are as few as chance has them."""

    def common(a: torch.Tensor, b: torch.Tensor) -> float:
        return sum(len(set(x) & set(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)) / len(a) / 8

    flat = LogNormal(sigma=0, tilt=0)
    x, table, seed = logits(2000, 256), inverse(flat, 256), flat.hash_seed(0)
    _, ids = route_lognormal_torch(x, table, seed, 8)
    assert common(ids, route_lognormal_torch(x, table, flat.hash_seed(1), 8)[1]) < 0.05
    assert common(ids, ids.roll(1, 0)) < 0.05
    nudged = x.clone()
    nudged[:, 0] += 0.5
    assert common(ids, route_lognormal_torch(nudged, table, seed, 8)[1]) < 0.05
    model = LogNormal()
    assert {tuple(model.inverse(layer, 32)[0]) for layer in (0, 1, 0)}.__len__() == 2


def test_domains_share_what_they_are_told_to() -> None:
    model = LogNormal(sigma=1.06, tilt=0)
    own, other = (hits(drawn(model, 10_000, 512, 10, domain), 512) for domain in (0, 1))
    together = torch.stack([own, other]).clamp(min=0.5).log()
    assert float(torch.corrcoef(together)[0, 1]) == pytest.approx(0.3, abs=0.12)
    coldest = own.argsort()[: int(0.15 * 512)]
    assert cold_share(own, 0.15) < 2.5 < 6 < 100 * float(other[coldest].sum() / other.sum()) < 15


def test_a_topic_has_favourites_of_its_own() -> None:
    model = LogNormal(sigma=0, tilt=1.0)
    x = logits(20_000, 64)
    _, ids = route_lognormal_torch(x, inverse(model, 64), 7, 4)
    topic = x[:, :16].float().argmax(1)
    for one in (0, 1):
        expected = -torch.from_numpy(model.inverse(0, 64)[one]).log()
        counted = hits(ids[topic == one], 64).clamp(min=0.5).log()
        assert float(torch.corrcoef(torch.stack([expected, counted.float()]))[0, 1]) > 0.9


def test_padding_goes_nowhere() -> None:
    padding = torch.tensor([False, True, False])
    weights, ids = route_lognormal_torch(logits(3, 32), inverse(LogNormal(), 32), 7, 4, padding)
    assert ids[1].tolist() == [-1] * 4 and not weights[1].any() and int(ids[0].min()) >= 0


def test_parameters_are_read() -> None:
    assert parse(NAME) == LogNormal()
    text = f"{NAME}:sigma=0.85-1.3,tilt=0,shared=1,domain=2,seed=7"
    model = parse(text)
    assert model == LogNormal(0.85, 1.3, 0.0, 1.0, 2, 7)
    sigmas = [model.layer_sigma(layer) for layer in range(50)]
    assert 0.85 <= min(sigmas) < 0.9 and 1.25 < max(sigmas) <= 1.3


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("uniform_random", "is not VAMP's"),
        (f"{NAME}:sigmas=1", "sigmas=1"),
        (f"{NAME}:sigma=wide", "sigma=wide"),
        (f"{NAME}:sigma", "sigma is none"),
        (f"{NAME}:tilt=1-2", "tilt=1-2"),
        (f"{NAME}:seed=1.5", "seed=0"),
        (f"{NAME}:shared=1.5", "shared=0.3"),
        (f"{NAME}:sigma=1.3-0.85", "downwards"),
    ],
)
def test_wrong_parameters_are_one_line(text: str, word: str) -> None:
    with pytest.raises(ConfigError, match=f"^{VARIABLE}: ") as caught:
        parse(text)
    assert word in str(caught.value) and "try " in str(caught.value) and "\n" not in str(caught.value)


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    assert points["vamp_benchmark_routing"] == "vamp_integration.benchmark_routing:register"


@pytest.mark.skipif(not (INTERPRET or CUDA), reason="needs CUDA or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 32, 4), (1, 8, 8), (9, 60, 5), (17, 512, 10)])
def test_the_kernel_draws_what_torch_draws(dtype: torch.dtype, tokens: int, experts: int, top_k: int) -> None:
    """Logarithms may differ in their last bit, which moves an arrival past another about never."""
    x = logits(tokens, experts, dtype=dtype)
    table, padding = inverse(LogNormal(), experts), torch.arange(tokens) == tokens - 2
    for skipped in (None, padding):
        want = route_lognormal_torch(x, table, 2**31 - 1, top_k, skipped)
        there = [None if t is None else t.to(DEVICE) for t in (x, table, skipped)]
        got = route_lognormal(there[0], there[1], 2**31 - 1, top_k, there[2], torch.int64)  # type: ignore[arg-type]
        assert got[1].dtype == torch.int64 and torch.equal(got[1].cpu().int(), want[1])
        assert torch.allclose(got[0].cpu(), want[0], atol=1e-6)


@pytest.mark.skipif(not (INTERPRET or CUDA), reason="needs CUDA or TRITON_INTERPRET=1")
@pytest.mark.parametrize("where", [slice(0, 1), slice(0, 3), slice(5, 9), slice(None)], ids=str)
def test_the_kernel_draws_experts_even_from_rows_of_nan(where: slice) -> None:
    """What fills a graph up is never written; the row it picks of the table must exist all the same."""
    x, table = logits(8, 512), inverse(LogNormal(), 512)
    x[::2, where] = float("nan")
    got = route_lognormal(x.to(DEVICE), table.to(DEVICE), 7, 10)[1].cpu()
    assert torch.equal(got, route_lognormal_torch(x, table, 7, 10)[1])


@pytest.mark.gpu
def test_a_captured_draw_follows_its_input_and_its_table() -> None:
    x, table = logits(64, 512).cuda(), inverse(LogNormal(), 512).cuda()
    route_lognormal(x, table, 7, 10)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, ids = route_lognormal(x, table, 7, 10)
    for seed, domain in ((1, 0), (1, 1), (2, 1)):
        x.copy_(logits(64, 512, seed))
        table.copy_(inverse(LogNormal(), 512, domain=domain))
        graph.replay()
        assert torch.equal(ids, route_lognormal(x, table, 7, 10)[1])
        same = (ids.cpu() == route_lognormal_torch(x.cpu(), table.cpu(), 7, 10)[1]).float().mean()
        assert float(same) > 0.999, "device and torch draw differently"


@pytest.mark.skipif(INTERPRET or CUDA, reason="the kernel runs in this process")
def test_the_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-k", "kernel_draws", __file__]
    child = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stdout[-3000:]
