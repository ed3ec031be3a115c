"""Time one MoE layer beside its peers.

python bench/moe_layer.py --model qwen3-next --tp 1 2 4 --json bench/results/h200/DATE-moe_layer.json
python bench/moe_layer.py --model qwen3-next --tp 1 --dtype fp8 --plot fp8.png
python bench/moe_layer.py --tokens 16 64 512 4096 --host 1 2 4 8 32 76 --plot host.png
python bench/moe_layer.py --experts 64 --top-k 6 --hidden 2048 --intermediate 1408 --routing lognormal:0.6

Every arm runs under a CUDA graph over the same weights, which take turns between layers so that none is read
from the cache. Without CUDA it runs in Triton's interpreter, at tiny sizes; its times mean nothing then:
TRITON_INTERPRET=1 python bench/moe_layer.py --model tiny --tokens 1 16

A recording of routing is JSON, the hits of experts layer by layer: {"hits": [[12, 0, 7], [3, 9, 1]]}
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
from device_time import ceilings
from moe_arms import ARMS, missing
from moe_cases import BLOCK, MODELS, Shape, layers_beyond_cache, make_weights, popularity
from moe_measure import DTYPES, Point, Run, measure
from moe_report import Row, git_commit, line, report, summary
from moe_residency import LinkRates, PagedWeights, Placement, choose, link_rates

from vamp_kernels import ranges
from vamp_kernels.arguments import MAX_EXPERTS, MAX_TOP_K
from vamp_runtime.errors import ConfigError
from vamp_runtime.memory.driver import MemoryDriver, Tier

TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DEFAULT_ARMS = {"bf16": ("vamp", "vllm", "torch_grouped_mm"), "fp8": ("vamp", "vllm", "vllm_swept")}
DIMENSIONS = ("experts", "top_k", "hidden", "intermediate")
LEAST = dict.fromkeys((*DIMENSIONS, "tp", "tokens", "repetitions"), 1)
LEAST |= dict.fromkeys(("host", "peer", "staged", "staging", "sweep_seconds"), 0)


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), help="default: qwen3-next")
    for name in DIMENSIONS:
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=int, help="dimensions by hand, all four, instead of --model")
    parser.add_argument("--tp", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument(
        "--dtype", default="bf16", choices=DTYPES, help="of the weights; fp8 is w8a8, 128x128 blocks"
    )
    parser.add_argument("--routing", default="uniform", help="uniform, lognormal:SIGMA or recorded:FILE")
    parser.add_argument("--host", nargs="+", type=int, metavar="N", help="numbers of experts in host memory")
    parser.add_argument("--peer", type=int, default=0, metavar="N", help="experts in the memory of GPU 1")
    parser.add_argument(
        "--staged", type=int, default=0, metavar="N", help="experts of the host with a copy here"
    )
    parser.add_argument(
        "--staging", type=int, metavar="N", help="slots to bring experts into; default: as --host"
    )
    parser.add_argument("--arm", nargs="+", choices=list(ARMS))
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument(
        "--sweep-seconds", type=float, default=60, help="for each point of vllm_swept, at most"
    )
    parser.add_argument("--no-check", action="store_true", help="skip the comparison with float32")
    parser.add_argument("--nvtx", action="store_true", help="ranges for a profiler; needs the package nvtx")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="needs matplotlib")
    parser.add_argument("--commit", help="what is measured, where the source lies outside its repository")
    return parser


def shapes(arguments: argparse.Namespace) -> list[tuple[str, int, Shape]]:
    """Model, TP degree and a rank's shape; ``ValueError`` where the arguments do not give one."""
    for name, least in LEAST.items():
        values = getattr(arguments, name)
        for value in values if isinstance(values, list) else [values]:
            if value is not None and not value >= least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected {least} or more")
    given = [getattr(arguments, name) for name in DIMENSIONS]
    models = {name: MODELS[name] for name in arguments.model or ["qwen3-next"]}
    if any(given):
        if arguments.model or not all(given):
            raise ValueError("--experts, --top-k, --hidden and --intermediate go together, without --model")
        if arguments.experts > MAX_EXPERTS or arguments.top_k > min(arguments.experts, MAX_TOP_K):
            raise ValueError(
                f"--experts {arguments.experts} --top-k {arguments.top_k}: "
                f"expected at most {MAX_EXPERTS}, and at most {MAX_TOP_K} of them"
            )
        models = {"x".join(map(str, given)): Shape(*given)}
    found = [(name, tp, shape.shard(tp)) for name, shape in models.items() for tp in arguments.tp]
    for name, tp, shape in found:
        if arguments.dtype == "fp8" and (shape.hidden % BLOCK or shape.intermediate % BLOCK):
            raise ValueError(
                f"--dtype fp8: {name} at --tp {tp} is {shape}, sizes must be multiples of {BLOCK}"
            )
        popularity(shape, arguments.routing, 1, torch.Generator(), torch.device("cpu"))
        for placement in placements(arguments):
            choose(placement, shape.experts, torch.device("cpu"))
    return found


def placements(arguments: argparse.Namespace) -> list[Placement]:
    """Where experts lie, point by point: all in the device's memory first, to compare the others with."""
    host = arguments.host or [0]
    moved = [Placement(n, arguments.peer, arguments.staged) for n in host]
    return [Placement(), *(placement for placement in moved if placement.moved)]


def available(arguments: argparse.Namespace, paged: bool) -> list[str]:
    """The arms that can run here, saying which cannot and why."""
    default = ("vamp", "vamp_no_table") if paged else DEFAULT_ARMS[arguments.dtype]
    arms = arguments.arm or default
    reasons = {arm: missing(arm, DTYPES[arguments.dtype]) for arm in arms}
    for arm, reason in reasons.items():
        if reason:
            print(f"without {arm}: {reason}", file=sys.stderr)
    found = [arm for arm in arms if not reasons[arm]]
    if not any(tokens <= ARMS[arm].most_tokens for arm in found for tokens in arguments.tokens):
        raise ValueError("--arm: none can run here with these --tokens")
    return found


def prepare_files(arguments: argparse.Namespace) -> None:
    """Make the folders of the files to write; ``ValueError`` where one could not be written after the run."""
    files = {name: getattr(arguments, name) for name in ("json", "plot") if getattr(arguments, name)}
    for name, path in files.items():
        if path.is_dir():
            raise ValueError(f"--{name} {path}: is a folder, expected a file")
        if name == "plot":
            importlib.import_module("moe_plot").check_suffix(path)
    for name, path in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--{name} {path}: {error.strerror}") from error
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"--{name} {path}: cannot be written")


def open_driver(arguments: argparse.Namespace) -> MemoryDriver:
    """``ValueError`` or ``ConfigError`` where this machine has no such memory."""
    if torch.cuda.is_available():
        from vamp_runtime.memory.cuda import CudaDriver

        return CudaDriver(0, peer=1 if arguments.peer else None)
    from vamp_runtime.memory.host import HostDriver

    if arguments.peer:
        raise ValueError(f"--peer {arguments.peer}: needs a second CUDA device")
    return HostDriver()


def run_shape(
    arguments: argparse.Namespace,
    case: tuple[str, int, Shape],
    arms: list[str],
    run: Run,
    driver: MemoryDriver | None,
) -> list[Row]:
    """The rows of one shape, printed as they come."""
    model, tp, shape = case
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), DTYPES[arguments.dtype]
    cache = torch.cuda.get_device_properties(device).L2_cache_size if cuda else 0
    layers = layers_beyond_cache(shape, cache, dtype.itemsize)
    rows: list[Row] = []
    resident: dict[tuple[str, int], float] = {}
    if driver is None:
        weights, paged = make_weights(shape, layers, device, dtype), None
    else:
        staging = arguments.staging
        staging = max(*(arguments.host or ()), 1, 1) if staging is None else staging
        paged = PagedWeights(driver, shape, layers, device, dtype, arguments.staged, staging)
    for placement in placements(arguments):
        if paged is not None:
            weights = paged.place(placement)
        for tokens in arguments.tokens:
            point = Point(model, arguments.dtype, tp, tokens, arguments.routing, shape, placement)
            new = measure(point, weights, arms, run, resident)
            rows += new
            print("\n".join(map(line, new)), flush=True)
    del weights
    gc.collect()
    if paged is not None:
        paged.close()
    if cuda:
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = parse()
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda:
        if os.environ.get("TRITON_INTERPRET") != "1":
            parser.error("no CUDA device: TRITON_INTERPRET=1 --model tiny interprets the kernels on a CPU")
        print("interpreted on a CPU: the times below mean nothing", file=sys.stderr)
    paged = bool(arguments.host is not None or arguments.peer or arguments.staged)
    try:
        cases = shapes(arguments)
        for option, module in (("nvtx", "nvtx"), ("plot", "matplotlib")):
            if getattr(arguments, option) and importlib.util.find_spec(module) is None:
                raise ValueError(f"--{option}: needs the package {module}; pip install {module}")
        arms = available(arguments, paged)
        driver = open_driver(arguments) if paged else None
        prepare_files(arguments)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    if arguments.nvtx:
        ranges.install(importlib.import_module("nvtx").annotate)
    device = torch.device("cuda" if cuda else "cpu")
    links: dict[str, LinkRates] = {}
    if driver is not None and cuda:
        away = {Tier.HOST: bool(arguments.host or arguments.staged), Tier.PEER: bool(arguments.peer)}
        links = {tier.value: link_rates(driver, tier, device) for tier, used in away.items() if used}
    run = Run(
        ceilings(device),
        links,
        arguments.repetitions if cuda else 1,
        not arguments.no_check,
        arguments.sweep_seconds,
    )
    rows: list[Row] = []
    for case in cases:
        rows += run_shape(arguments, case, arms, run, driver)
    if driver is not None:
        driver.close()
    print("\n".join(summary(rows)), flush=True)
    record = report(rows, run.limits, links, arguments.commit or git_commit())
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        importlib.import_module("moe_plot").save(record, arguments.plot)


if __name__ == "__main__":
    main()
