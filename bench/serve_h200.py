"""The serving benchmark: recorded sessions against unmodified vLLM and VAMP at equal memory; decode steps.

A sub-command starts one engine and serves every arm in it; some run several engines one after another:

python bench/serve_h200.py anchor --sessions 8 16 28          unmodified vLLM
python bench/serve_h200.py upper --sessions 8 16 28           ... with a KV pool that holds everything
python bench/serve_h200.py plain --sessions 8 16 28           both in one engine
python bench/serve_h200.py offload --sessions 8 16 28 56      ... with KV offloading to host memory
python bench/serve_h200.py vamp --sessions 8 16 28            VAMP: arms that move experts only
python bench/serve_h200.py spill --sessions 8 16 28 56        VAMP with KV offloading to host memory
python bench/serve_h200.py steps                              decode steps and growth, unmodified and VAMP
python bench/serve_h200.py peer                               decode steps, 10 % of the experts in another GPU
python bench/serve_h200.py first                              plain and vamp at 28 sessions, steps, growth

--detach lets a run outlive the command that began it; `wait --seconds N` shows how far it is, `stop` ends it
after the step under way. Whatever a run leaves out, the same command measures when it is given again.
Before, `prepare` cuts a trace to what a replay reaches, for machines without zstandard; `order` writes a
routing profile for engines whose groups hold several experts. --tiny tries all of it on a CPU with a tiny
model, where times mean nothing.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import serve_load
import serve_order
import serve_record as keep
import serve_steps
from serve_arms import GIB, PARTS, Arm, Machine, Part, check_shared_memory, parse_arm, set_environment
from serve_points import Points

from vamp_integration.replay.arms import parse_engine_args
from vamp_integration.replay.trace import TraceError
from vamp_profiles import ProfileError
from vamp_runtime.errors import ConfigError

STILL_RUNNING, REFUSED = 75, 2
FEW = ("--shares", "0", "0.10", "0.25")
ALL_OUT = ("--shares", "0", "0.10", "0", "--batches", "16", "64")
SHARES = ("0", "0.05", "0.10", "0.15", "0.25", "0")
#: Engines of the sub-commands that run several: their arguments, beside those given.
RUNS = {
    "first": [
        ["plain", "--sessions", "28", "--shares", "0"],
        ["vamp", "--sessions", "28", "--arms", "vamp_direct_0.25", *FEW, "--growths", "3"],
    ],
    "peer": [
        ["vamp", "--sessions", "--max-ratio", "0.10", "--vamp-arg", "peer_hbm_gib=16", *ALL_OUT],
    ],
    "steps": [
        ["anchor", "--sessions", "--shares", "0"],
        ["vamp", "--sessions", "--shares", *SHARES, "--growths", "5"],
        ["vamp", "--sessions", "--shares", "0", "--growths", "5", "--kernel", "vllm"],
    ],
}
ROUTING = "vamp_lognormal:sigma=1.06,seed=0"


def parse() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, part in PARTS.items():
        one = commands.add_parser(name, help=part.about)
        _load_options(one, part)
        _engine_options(one)
        _run_options(one)
    for name in RUNS:
        several = commands.add_parser(name, help="; ".join(" ".join(run) for run in RUNS[name]))
        _run_options(several)
    for name in ("wait", "stop"):
        other = commands.add_parser(name)
        other.add_argument("--out", type=Path, default=Path("out/serve"))
        if name == "wait":
            other.add_argument("--seconds", type=float, default=500.0)
    order = commands.add_parser("order", help="write a routing profile of the simulated routing")
    order.add_argument("out", type=Path)
    order.add_argument("--model", default="out/qwen3-next-80b-a3b", help="folder of a config.json")
    order.add_argument("--layers", type=int, default=24, help="layers kept; 0 for all")
    order.add_argument("--routing", default=ROUTING)
    prepare = commands.add_parser("prepare", help="cut a trace to what is replayed, as plain JSON lines")
    prepare.add_argument("original", type=Path)
    prepare.add_argument("out", type=Path)
    prepare.add_argument("--workload", default="peak140k")
    prepare.add_argument("--turns", type=int, default=60, help="turns of each session after those skipped")
    return parser


def _load_options(parser: argparse.ArgumentParser, part: Part) -> None:
    parser.add_argument("--sessions", nargs="*", type=int, default=[28])
    parser.add_argument(
        "--arms", nargs="+", default=list(part.default), help="ARM, or ARM@16 for 16 sessions only"
    )
    parser.add_argument(
        "--measure", type=float, default=90.0, help="seconds after every session's first turn"
    )
    parser.add_argument("--fill", type=float, default=180.0, help="longest time for the first turns, seconds")
    parser.add_argument("--workload", default="peak140k")
    parser.add_argument("--traces", type=Path, default=Path("out/traces"), help="folder of the traces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--shares", nargs="*", type=float, default=[], help="decode steps: shares of experts out"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 32, 64, 128])
    parser.add_argument("--growths", type=int, default=0, help="growths of 1 GiB to measure, one on another")
    parser.add_argument("--growth-batch", type=int, default=16)


def _engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", default="out/qwen3-next-80b-a3b", help="folder of a checkpoint or a config.json"
    )
    parser.add_argument("--layers", type=int, default=24, help="layers to keep; 0 for all")
    parser.add_argument("--weights", choices=("random", "checkpoint"), default="random")
    parser.add_argument("--kv-gib", type=float, default=8.02)
    parser.add_argument("--upper-gib", type=float, default=40.0)
    parser.add_argument("--host-kv-gib", type=float, default=40.0)
    parser.add_argument(
        "--max-ratio", type=float, default=0.25, help="share of the experts with a home in host memory"
    )
    parser.add_argument(
        "--kernel", choices=("vamp", "vllm"), default="vamp", help="MoE kernel of VAMP's engines"
    )
    parser.add_argument("--policy", default="auto", help="policy profile of the arms whose kind names none")
    parser.add_argument(
        "--routing", help=f"routing simulation of every arm, default {ROUTING}; '' for the model's own"
    )
    parser.add_argument("--engine-arg", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--vamp-arg", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--anchor", help="results file with the unmodified arm to compare with")


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("out/serve"))
    parser.add_argument(
        "--caches", type=Path, default=Path("out/caches"), help="compiled kernels, kept between engines"
    )
    parser.add_argument("--budget-s", type=float, help="begin no point that would end after so many seconds")
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--commit", help="what is measured, where the source lies outside its repository")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU, to try the script")


def machine(arguments: argparse.Namespace, max_model_len: int) -> Machine:
    """What the arguments say about the engine; under --tiny what fits a CPU."""
    given = parse_engine_args(arguments.engine_arg)
    whole = Machine(
        model=arguments.model,
        layers=arguments.layers,
        random_weights=arguments.weights == "random",
        kv_bytes=int(arguments.kv_gib * GIB),
        upper_bytes=int(arguments.upper_gib * GIB),
        host_kv_gib=arguments.host_kv_gib,
        max_ratio=arguments.max_ratio,
        max_model_len=max_model_len,
        max_num_seqs=128,
        max_num_batched_tokens=8192,
        kernel=arguments.kernel,
        engine={"gdn_prefill_backend": "triton", **given},
        vamp=parse_engine_args(arguments.vamp_arg),
    )
    if not arguments.tiny:
        return whole
    from vamp_integration.tiny_model import write_checkpoint

    folder = arguments.caches / "tiny"
    if not folder.exists():
        write_checkpoint(folder)
    tiny = {
        "layers": 0,
        "random_weights": False,
        "kv_bytes": 5 << 20,
        "upper_bytes": 16 << 20,
        "engine": given,
    }
    tiny |= {"model": str(folder), "max_num_seqs": 8, "max_num_batched_tokens": 1024, "kernel": "vllm"}
    return replace(whole, **tiny)


def wanted_points(arguments: argparse.Namespace) -> list[tuple[int, Arm]]:
    """Numbers of sessions and arms to replay, in order; an arm with ``@16`` at 16 sessions only."""
    wanted = []
    for number in arguments.sessions:
        for name in arguments.arms:
            arm, _, only = name.partition("@")
            if not only or only == str(number):
                wanted.append((number, parse_arm(arm, arguments.policy)))
    return wanted


def run_part(arguments: argparse.Namespace, name: str) -> int:
    """Measure what is not in the part's results yet; the exit code."""
    part, wanted = PARTS[name], wanted_points(arguments)
    for _, arm in wanted:
        if arm.kind not in part.arms:
            raise ConfigError(f"--arms {arm.name}: not in {name}; it runs {', '.join(part.arms)}")
    plan = serve_steps.Plan(growth_batch=arguments.growth_batch)
    if arguments.routing is None:
        arguments.routing = "" if arguments.tiny else ROUTING
    if arguments.tiny:
        arguments.workload, arguments.traces = "demo", Path(__file__).parent / "traces"
        policy = arguments.policy
        wanted = [(n, replace(arm, staging="off", policy=policy if arm.vamp else "")) for n, arm in wanted]
        plan = serve_steps.Plan(
            steps=20, point_s=2, warm_prompts=2, warm_tokens=500, warm_batch=4, growth_bytes=1, growth_batch=2
        )
    workload = serve_load.workload(arguments.workload)
    trace = serve_load.read(workload, arguments.traces)
    set_environment(part, arguments.routing, arguments.caches.absolute())
    started = machine(arguments, workload.max_model_len)
    check_shared_memory(part, started)
    points = Points(arguments, name, part, started, trace, plan)
    for number, arm in wanted:
        points.replay(arm, number)
    for index, share in enumerate(arguments.shares):
        for batch in arguments.batches:
            points.steps(share, batch, arguments.shares[:index].count(share))
    for repeat in range(arguments.growths):
        points.growth(repeat)
    return points.close()


def run_several(arguments: argparse.Namespace, rest: list[str]) -> int:
    """The engines of a composite one after another, each in its process; the first exit code over 0."""
    clock, code = keep.Clock(arguments.budget_s), 0
    common = ["--out", str(arguments.out), "--caches", str(arguments.caches), *rest]
    common += ["--tiny"] if arguments.tiny else []
    common += ["--commit", arguments.commit] if arguments.commit else []
    for run in RUNS[arguments.command]:
        budget = [] if clock.left_s is None else ["--budget-s", f"{max(clock.left_s, 0):.0f}"]
        process = subprocess.Popen([sys.executable, __file__, *run, *common, *budget])
        while process.poll() is None:
            time.sleep(0.2)
            if clock.stopped:
                process.send_signal(signal.SIGTERM)
                time.sleep(2.0)
        code = code or process.returncode
        if clock.stopped:
            break
    return code


def other(arguments: argparse.Namespace) -> int:
    """``wait``, ``stop``, ``order`` and ``prepare``."""
    if arguments.command == "wait":
        ended = keep.wait(arguments.out, arguments.seconds, lambda line: print(line, flush=True))
        return 0 if ended else STILL_RUNNING
    if arguments.command == "stop":
        process = keep.running(arguments.out)
        if process is None:
            raise ConfigError(f"--out {arguments.out}: no detached run in it")
        os.kill(process, signal.SIGTERM)
        return 0
    if arguments.command == "order":
        layers = serve_order.write(arguments.model, arguments.layers, arguments.routing, arguments.out)
        print(f"{arguments.out}: {layers} layers; give it as --vamp-arg record_order={arguments.out}")
        return 0
    workload = serve_load.workload(arguments.workload)
    sessions, turns = serve_load.slim(arguments.original, workload, arguments.turns, arguments.out)
    print(f"{arguments.out}: {sessions} sessions, {turns} turns")
    return 0


def main(argv: list[str]) -> int:
    arguments, rest = parse().parse_known_args(argv)
    if rest and arguments.command not in RUNS:
        parse().error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.given = argv
    try:
        if arguments.command in ("wait", "stop", "order", "prepare"):
            return other(arguments)
        if arguments.detach and (process := keep.detach(arguments.out)):
            print(f"process {process}, see {arguments.out}")
            return 0
        if arguments.command in RUNS:
            return run_several(arguments, rest)
        return run_part(arguments, arguments.command)
    except (ConfigError, ProfileError, TraceError) as error:
        print(f"serve_h200.py: {error}", file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
