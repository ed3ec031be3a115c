"""``vamp profile-routing``: count which experts tokens are routed to, and write the records' order."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from vamp_integration import compat, settings
from vamp_integration.config_errors import as_config_errors
from vamp_integration.lognormal import VARIABLE
from vamp_integration.replay.arms import check_model, parse_engine_args
from vamp_integration.routing_profile import COLD, coverage, read_prompts, write_profile
from vamp_runtime.errors import ConfigError

METHOD = "vamp_hits"
SERVER_TIMEOUT_S = 60.0


def profile_routing(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or name; none with --server.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(help='Text, a prompt a line, or .jsonl rows {"prompt": text or token ids}.'),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="Address of a running `vamp serve`, started with VLLM_SERVER_DEV_MODE=1."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The profile to write.")] = Path(
        "order.json"
    ),
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate for each prompt.")] = 128,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="More engine arguments, key=value, value as JSON.")
    ] = None,
    vamp_arg: Annotated[list[str] | None, typer.Option(help="More settings of VAMP, key=value.")] = None,
) -> None:
    """Count routed tokens, on your prompts or in a running server, and write a routing profile.

    The next start takes it: vamp serve MODEL --additional-config.vamp.record_order order.json
    """
    if (prompts is None) == (server is None) or bool(model) == (server is not None):
        raise ConfigError("profile-routing: give MODEL and --prompts FILE, or --server ADDRESS alone")
    if server is not None:
        hits, about = _ask(server), {"server": server}
    else:
        assert prompts is not None
        hits, about = _count(model, prompts, max_tokens, engine_arg or [], vamp_arg or [])
    found = coverage(hits)
    write_profile(output, hits, {**about, "date": datetime.now(UTC).date().isoformat(), **_versions()})
    typer.echo(
        f"wrote {output}: {len(hits)} layers of {len(hits[0])} experts, {found.selections} selections; the "
        f"coldest {COLD:.0%} of the experts got {found.cold_share:.1%}, and {found.unused_share:.1%} of the "
        "experts were never used (more prompts make that fewer)"
    )


def _count(
    model: str, path: Path, max_tokens: int, engine_arg: list[str], vamp_arg: list[str]
) -> tuple[list[list[int]], dict[str, Any]]:
    """Hits ``[layers][experts]`` of an engine that runs the prompts, with nothing offloaded."""
    prompts = read_prompts(path)
    vamp = {"max_offload_ratio": 0.0, **parse_engine_args(vamp_arg)}
    settings.parse(vamp)
    more = parse_engine_args(engine_arg)
    check_model(model)
    compat.check_version(compat.installed_vllm())
    from vllm import EngineArgs, SamplingParams
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    options: dict[str, Any] = {
        "model": model,
        "load_format": settings.LOAD_FORMAT,
        "additional_config": {settings.KEY: vamp},
        "skip_tokenizer_init": not any(isinstance(prompt, str) for prompt in prompts),
        # On a CPU torch.compile takes minutes at every first start, so there it has to be asked for.
        "enforce_eager": current_platform.is_cpu(),
        **more,
    }
    with as_config_errors():
        config = EngineArgs(**options).create_engine_config(UsageContext.LLM_CLASS)
    engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    most = config.model_config.max_model_len - max_tokens
    if most < 1:
        raise ConfigError(
            f"--max-tokens: {max_tokens} leaves no room for a prompt; try {most + max_tokens - 1}"
        )
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        ids = engine.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        engine.add_request(str(number), {"prompt_token_ids": ids[:most]}, sampling)
    while engine.has_unfinished_requests():
        engine.step()
    hits: list[list[int]] = engine.collective_rpc(METHOD)[0]
    return hits, {"model": model, "prompts": len(prompts), "max_tokens": max_tokens}


def _ask(server: str) -> list[list[int]]:
    """Hits ``[layers][experts]`` of a server since its start."""
    mend = "give the address of a server started with VLLM_SERVER_DEV_MODE=1, as in http://localhost:8000"
    body = json.dumps({"method": METHOD}).encode()
    try:
        request = urllib.request.Request(
            f"{server.rstrip('/')}/collective_rpc", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT_S) as answer:
            hits: list[list[int]] = json.load(answer)["results"][0]
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError, LookupError) as error:
        raise ConfigError(f"--server: {server}: {' '.join(str(error).split())}; {mend}") from None
    return hits


def _versions() -> dict[str, str]:
    named = {"vamp": metadata.version("vamp-moe")}
    strategy = os.environ.get(VARIABLE, "")
    return {**named, "simulated_routing": strategy} if strategy else named
