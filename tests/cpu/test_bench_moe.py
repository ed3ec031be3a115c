"""The parts of the microbenchmark that need no device: cases, sweep, residency, summary, plots."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vamp_runtime.memory.driver import Tier
from vamp_runtime.memory.host import HostDriver

BENCH = Path(__file__).parents[2] / "bench"
CPU = torch.device("cpu")
MODULES = ("cases", "residency", "sweep", "report", "plot", "measure", "layer", "trace")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The bench's modules by name; its folder is no package, so it is put on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        yield {name: importlib.import_module(f"moe_{name}") for name in MODULES}


def step(bench: Any, ids: list[list[int]], hidden: int) -> Any:
    topk_ids = torch.tensor(ids, dtype=torch.int32)
    return bench["cases"].Step(torch.zeros(len(ids), hidden), torch.ones(topk_ids.shape), topk_ids)


def test_work_counts_each_byte_once_by_tier(bench: Any) -> None:
    cases = bench["cases"]
    shape = cases.Shape(experts=8, top_k=2, hidden=256, intermediate=128)
    steps = [step(bench, [[0, 1], [1, -1]], 256), step(bench, [[5, 1], [6, 7]], 256)]
    found = cases.work(shape, steps, torch.bfloat16, torch.tensor([1, 6]), torch.tensor([7]))
    expert, pairs = 3 * 256 * 128 * 2, 3.5
    moved = pairs * (2 * 2 * 128 + 2 * 2 * 256) + 2 * 2 * 2 * 256
    assert found.host_bytes == expert * 1.5 and found.peer_bytes == expert * 0.5
    assert found.hbm_bytes == expert * (3 - 1.5 - 0.5) + moved
    assert found.flops == pairs * 2 * 3 * 256 * 128
    narrow = cases.work(shape, steps, cases.FP8)
    scales = 4 * (2 * 2 + 2 * 1)
    assert narrow.bytes == 3 * (expert / 2 + scales) + moved - pairs * 2 * 128


def test_fp8_weights_are_near_what_they_were_made_of(bench: Any) -> None:
    pytest.importorskip("triton")
    from vamp_kernels.quantize import dequantize_torch

    cases = bench["cases"]
    shape = cases.Shape(experts=2, top_k=1, hidden=256, intermediate=128)
    wide = cases.make_weights(shape, 2, CPU, torch.float32)
    narrow = cases.make_weights(shape, 2, CPU, cases.FP8)
    w13_scale, w2_scale = narrow.scales[1]
    assert w13_scale.shape == (2, 2, 2) and w2_scale.shape == (2, 2, 1)
    for of, want, scale in zip(narrow.layer(1), wide.layer(1), (w13_scale, w2_scale), strict=True):
        for expert in range(2):
            error = dequantize_torch(of[expert], scale[expert]) - want[expert]
            assert error.square().mean().sqrt() < 0.04 * want[expert].square().mean().sqrt()


def test_routings_draw_what_they_say(bench: Any, tmp_path: Path) -> None:
    cases = bench["cases"]
    shape = cases.Shape(experts=6, top_k=2, hidden=4, intermediate=4)
    recording = tmp_path / "hits.json"
    recording.write_text(json.dumps({"hits": [[900, 90, 10, 0, 0, 0], [0, 0, 0, 1, 1, 1]]}))
    first, second = cases.make_steps(shape, 500, 2, f"recorded:{recording}", CPU)
    assert set(first.topk_ids.flatten().tolist()) == {0, 1, 2}
    assert set(second.topk_ids.flatten().tolist()) == {3, 4, 5}
    counts = torch.bincount(first.topk_ids.flatten(), minlength=6)
    assert counts[0] > counts[1] > counts[2]
    uniform = cases.make_steps(shape, 2000, 1, "uniform", CPU)[0]
    assert (torch.bincount(uniform.topk_ids.flatten()) - 4000 / 6).abs().max() < 150
    skewed = cases.make_steps(shape, 2000, 1, "lognormal:2", CPU)[0]
    assert torch.bincount(skewed.topk_ids.flatten(), minlength=6).float().std() > 300
    assert all(len(set(row)) == 2 for row in skewed.topk_ids.tolist())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", 'not {"hits"'),
        ('{"hits": [[1, 2]]}', r"is \[1, 2\], expected \[layers, 3\]"),
        ('{"hits": [[1, 1, 1], [0, 0, 1]]}', r"hits\[1\] needs 2 experts above 0"),
        ('{"hits": [[1, 1, -1]]}', r"hits\[0\]"),
        ('{"hits": [[1, 1, Infinity]]}', r"hits\[0\].*all finite"),
        ('{"hits": [[1, 1, 1' + "0" * 400 + "]]}", "int too large"),
    ],
)
def test_a_recording_that_does_not_fit_is_named(bench: Any, tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "hits.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*{says}"):
        bench["cases"].recorded_hits(path, 3, 2)


def test_renamed_steps_hit_what_is_away_and_keep_their_rows(bench: Any) -> None:
    residency = bench["residency"]
    drawn = step(bench, [[0, 1], [1, 2], [5, 1]], 4)
    wanted = torch.tensor([2, 6, 7])
    got = residency.touching(drawn, 8, wanted, seed=0)
    assert set(wanted.tolist()) <= set(got.topk_ids.unique().tolist())
    rows = [sorted(torch.bincount(s.topk_ids.flatten()).tolist(), reverse=True)[:4] for s in (drawn, got)]
    assert rows[0] == rows[1] == [3, 1, 1, 1]
    many = residency.touching(drawn, 8, torch.arange(8), seed=0)
    assert torch.equal(many.topk_ids, drawn.topk_ids)


def test_experts_move_between_tiers_and_keep_their_bytes(bench: Any) -> None:
    cases, residency = bench["cases"], bench["residency"]
    shape = cases.Shape(experts=6, top_k=2, hidden=64, intermediate=32)
    driver = HostDriver(granularity=4096)
    paged = residency.PagedWeights(driver, shape, 2, CPU, torch.bfloat16, staged=2, staging=3)
    want = cases.make_weights(shape, 2, CPU)
    page = 12288
    for host, staged in ((0, 0), (3, 2), (1, 0), (4, 1), (0, 0)):
        weights = paged.place(residency.Placement(host=host, staged=staged))
        assert driver.usage().tier_bytes.get(Tier.HOST, 0) == 2 * (host + staged) * page
        for layer in range(2):
            read = weights.slots[layer].long()
            assert torch.equal(weights.w13[read], want.layer(layer)[0])
            assert torch.equal(weights.w2[read], want.layer(layer)[1])
            assert torch.equal(weights.layer(layer)[1], want.layer(layer)[1])
            assert int(weights.host_experts[layer].sum()) == host
            away = int((read >= layer * 11 + 6).sum())
            assert away == staged and not set(read.tolist()) & set(weights.staging_slots[layer].tolist())
    del weights
    paged.close()
    driver.close()
    driver = HostDriver(granularity=4096)
    rates = residency.link_rates(driver, Tier.HOST, CPU, nbytes=1 << 20, repetitions=2)
    assert rates.copied > 0 and rates.read > 0 and driver.usage().reservations == 0
    driver.close()
    with pytest.raises(ValueError, match="moves 7 experts"):
        residency.choose(residency.Placement(host=7), 6, CPU)


def test_a_sweep_takes_the_best_and_stays_small(bench: Any) -> None:
    sweep = bench["sweep"]
    tried = []

    def time_us(config: dict[str, int]) -> float | None:
        tried.append(config)
        if not config:
            return 50.0
        if config["BLOCK_SIZE_M"] == 64:
            return None
        return abs(config["BLOCK_SIZE_N"] - 256) + config["num_stages"]

    for rows in (1.2, 200):
        tried.clear()
        found = sweep.sweep(time_us, sweep.grid(rows, 128), seconds=60)
        assert found.config["BLOCK_SIZE_N"] == 256 and len(tried) == found.timed + found.failed <= 24
        assert found.failed and found.us == 3.0
    assert sweep.sweep(time_us, sweep.grid(1.2, 128), seconds=-1) is None


def row(arm: str, us: float, **changes: Any) -> dict[str, Any]:
    settings = {"model": "m", "dtype": "bf16", "tp": 1, "tokens": 16, "routing": "uniform", "arm": arm}
    settings |= {"host_experts": 0, "peer_experts": 0, "staged_experts": 0}
    figures = {"us_median": us, "us_p10": us, "us_p90": us, "roofline_us": 5.0, "bound_ratio": None}
    return {**settings, **figures, "resident_us": None, "bound_us": None, **changes}


def test_bounds_and_summary_of_a_point(bench: Any) -> None:
    measure, residency, report = bench["measure"], bench["residency"], bench["report"]
    shape = bench["cases"].Shape(8, 2, 64, 32)
    point = measure.Point("m", "bf16", 1, 16, "uniform", shape, residency.Placement(host=2))
    links = {"host": residency.LinkRates(copied=60e9, read=50e9)}
    run = measure.Run(measure.Ceilings(4e12, 800e12), links, 1, True, 1.0)
    least = bench["cases"].Work(hbm_bytes=40e6, host_bytes=1e6, peer_bytes=0, flops=80e6)
    found = measure.bounds(least, point, run, resident_us=12.0, us=22.0)
    assert math.isclose(found["roofline_us"], 20) and math.isclose(found["bound_us"], 20)
    assert math.isclose(found["bound_ratio"], 1.1) and math.isclose(found["bound_copy_engine_us"], 1e2 / 6)
    rows = [row("vamp", 10), row("vllm", 20), row("vamp", 10, tokens=64), row("vllm", 5, tokens=64)]
    rows += [row("vamp", 22, host_experts=2, bound_ratio=1.1), row("vllm", 900, host_experts=2)]
    lines = report.summary(rows)
    assert "vllm / vamp, m bf16 tp all: geometric mean 1.000 over 2 points" in "\n".join(lines)
    assert "from 0.500 (tp 1, 64 tokens) to 2.000 (tp 1, 16 tokens)" in lines[0]
    assert "vamp / bound: at most 1.100 over 1 points (tp 1, 16 tokens, 2 host)" in lines[-1]


def test_plots_are_drawn_from_a_record_alone(bench: Any, tmp_path: Path) -> None:
    recorded = json.loads((BENCH / "results/h200/2026-11-29-moe_layer.json").read_text())
    bench["plot"].save(recorded, tmp_path / "tokens.png")
    moved = [row("vamp", 10.0 * n, host_experts=n, bound_us=9.0 * n, resident_us=8.0) for n in (1, 2, 8)]
    figure = bench["plot"].draw(recorded | {"rows": [row("vamp", 8), *moved]})
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {"vamp", "bound", "vamp, all in HBM"}
    assert (tmp_path / "tokens.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting property name"),
        ('{"rows": []}', "no rows"),
        ('{"rows": [1]}', "not a record of moe_layer.py"),
        ('{"rows": [{"model": "m"}]}', "no 'dtype' in it"),
    ],
)
def test_a_record_that_cannot_be_plotted_is_named(
    bench: Any, tmp_path: Path, text: str, says: str, monkeypatch: Any, capsys: Any
) -> None:
    record, out = tmp_path / "broken.json", tmp_path / "out" / "plot.png"
    record.write_text(text)
    monkeypatch.setattr(sys, "argv", ["moe_plot.py", str(record), "-o", str(out)])
    with pytest.raises(SystemExit) as end:
        bench["plot"].main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and f"{record}: {says}" in last and not out.parent.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--tp 0", "--tp 0: expected 1 or more"),
        ("--tokens 4 -1", "--tokens -1: expected 1 or more"),
        ("--repetitions 0", "--repetitions 0: expected 1 or more"),
        ("--host -1", "--host -1: expected 0 or more"),
        ("--peer 1", "--peer 1: needs a second CUDA device"),
        ("--experts 0", "--experts 0: expected 1 or more"),
        ("--experts 8 --top-k 9 --hidden 16 --intermediate 16", "--experts 8 --top-k 9: expected at most"),
        ("--routing lognormal:nan", "--routing lognormal:nan: expected a SIGMA of 0 or more"),
        ("--arm vllm", "--arm: none can run here"),
        ("--json .", "--json .: is a folder"),
        ("--json file/moe.json", "--json file/moe.json: "),
        ("--plot moe.nope", "moe.nope: no format to plot in"),
    ],
)
def test_what_cannot_be_run_is_one_line(
    bench: Any, words: str, says: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(sys, "argv", ["moe_layer.py", "--json", "out/moe.json", *words.split()])
    with pytest.raises(SystemExit) as end:
        bench["layer"].main()
    printed = capsys.readouterr()
    assert end.value.code == 2 and not printed.out and says in printed.err.splitlines()[-1]
    assert os.listdir() == ["file"]


@pytest.mark.parametrize(("dtype", "width"), [("bf16", 16), ("fp8", 128)])
def test_the_command_in_the_interpreter(dtype: str, width: int, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "moe.json"
    command = [sys.executable, "moe_layer.py", "--tokens", "9", "--arm", "vamp", "--json", str(out)]
    sizes = {"experts": 3, "top-k": 2, "hidden": 2 * width, "intermediate": width}
    command += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    command += ["--dtype", dtype]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(command, cwd=BENCH, env=environment, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr[-2000:]
    only = json.loads(out.read_text())["rows"][0]
    assert only["model"] == f"3x2x{2 * width}x{width}" and 0 < only["rms_error"] < 0.05
    assert "the times below mean nothing" in child.stderr


def test_a_trace_gives_each_kernel_to_the_innermost_range_that_launched_it(bench: Any) -> None:
    def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}

    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        event("user_annotation", "layer", 1000.0, 50.0),
        event("user_annotation", "up", 1010.0, 20.0),
        event("cpu_op", "aten::empty", 1011.0, 1.0),
        event("cuda_runtime", "cudaLaunchKernel", 1001.0, 2.0, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 1012.0, 2.0, correlation=2, cbid=307),
        event("cuda_runtime", "cudaEventRecord", 1030.0, 2.0, correlation=3),
        event("kernel", "_up", 1100.0, 7.0, correlation=2, stream=7, device=0),
        event("kernel", "_other", 1090.0, 5.0, correlation=1),
        event("kernel", "before", 1080.0, 9.0, correlation=9),
    ]
    found = bench["trace"].essential(events)
    names = ["python", "layer", "up", "cudaLaunchKernel", "cuLaunchKernelEx", "_up", "_other", "before"]
    assert [e["args"].get("name", e["name"]) for e in found] == names
    assert found[1]["ts"] == 0.0 and found[5]["ts"] == 100.0
    assert found[5]["args"] == {"correlation": 2, "stream": 7}
    kernels = bench["trace"].kernels_by_range(found)
    assert [e["name"] for e in kernels["up"]] == ["_up"] and [e["name"] for e in kernels["layer"]] == [
        "_other"
    ]
    _, layer, up = bench["trace"].summary(found, 1)
    assert layer.split() == ["layer", "50.0", "5.0", "_other"] and up.split() == ["up", "20.0", "7.0", "_up"]
