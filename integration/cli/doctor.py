"""``vamp doctor``: whether VAMP can serve on this machine, and what to do where it cannot."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vamp_integration import settings
from vamp_integration.doctor.checks import diagnose
from vamp_integration.doctor.findings import Finding
from vamp_integration.doctor.memory import Needs
from vamp_integration.doctor.probe import probe
from vamp_integration.home_room import check_homes
from vamp_integration.model_rules import check_model
from vamp_integration.plan import check_plan, hardware_profile
from vamp_profiles import ProfileError
from vamp_runtime.errors import ConfigError

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a checkpoint: also check whether this host can hold its homes."),
    ] = None,
    max_offload_ratio: Annotated[float | None, typer.Option(help="As for `vamp serve`.")] = None,
    peer_hbm_gib: Annotated[float | None, typer.Option(help="As for `vamp serve`.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Ranks on this host.")] = 1,
    vamp_hardware: Annotated[
        str | None, typer.Option(help="Hardware profile to compare with: a name or a TOML file.")
    ] = None,
    device: Annotated[int, typer.Option(min=0, help="GPU to look at.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts and findings as JSON.")] = False,
) -> None:
    """Check driver, memory, link, vLLM and its environment; say what is wrong and what to do.

    Ends with status 1 where something keeps an engine from starting.
    """
    given = {
        "max_offload_ratio": max_offload_ratio,
        "peer_hbm_gib": peer_hbm_gib,
        "hardware": vamp_hardware,
    }
    chosen = settings.parse({name: value for name, value in given.items() if value is not None})
    config = {} if model is None else read_config(model)
    facts = probe(device, os.environ, peer_bytes=int(chosen.peer_hbm_gib * 2**30))
    hardware = hardware_profile(chosen, facts.device)
    needs = None
    if model is not None:
        needs = model_needs(model, config, chosen, tensor_parallel_size, facts.device)
    findings = diagnose(facts, hardware, needs, chosen.peer_hbm_gib, tensor_parallel_size)
    blocked = any(finding.status == "problem" for finding in findings)
    if as_json:
        typer.echo(json.dumps(report(facts, findings, blocked)))
    else:
        show(Console(), findings, facts.device)
    if blocked:
        raise typer.Exit(1)


def read_config(model: str) -> dict[str, Any]:
    """A checkpoint's ``config.json``. Raises ``ConfigError`` where there is none."""
    config = _read_json(Path(model) / "config.json")
    separate = Path(model) / "hf_quant_config.json"  # where older releases of ModelOpt describe the weights
    if "quantization_config" not in config and separate.is_file():
        return {**config, "quantization_config": _read_json(separate)}
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model: {path} cannot be read ({error}); give the folder of a checkpoint"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError(f"--model: {path} is no JSON object; give the folder of a checkpoint")
    return value


def model_needs(
    name: str, config: dict[str, Any], chosen: settings.VampSettings, ranks: int, device: str
) -> Needs:
    """What the model asks of this host: the checks that the engine makes at its start."""
    text, home_bytes = config.get("text_config"), 0
    try:
        check_model(config, device)
        merged = {**config, **text} if isinstance(text, dict) else config
        geometry = check_plan(chosen, merged, ranks, None, device)
        if geometry is None:
            return Needs(name)
        home_bytes = geometry.host_home_bytes
        return Needs(name, home_bytes, check_homes(chosen, geometry, ranks))
    except (ConfigError, ProfileError) as error:
        return Needs(name, home_bytes, problem=str(error))


def report(facts: Any, findings: list[Finding], blocked: bool) -> dict[str, Any]:
    return {
        "blocked": blocked,
        "device": facts.device,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": dataclasses.asdict(facts),
    }


def show(console: Console, findings: list[Finding], device: str) -> None:
    """A line per finding, with what to do under those that are not ok."""
    grid = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        status = Text(finding.status, style=COLOURS[finding.status])
        grid.add_row(status, finding.check, Text(finding.text))
        if finding.remedy:
            grid.add_row("", "", Text(f"-> {finding.remedy}"))
    console.print(grid)
    problems = sum(finding.status == "problem" for finding in findings)
    engine = "CPU" if device == "cpu" else "GPU"
    blocking = "1 problem keeps" if problems == 1 else f"{problems} problems keep"
    console.print(
        f"{blocking} VAMP's {engine} engine from starting"
        if problems
        else f"VAMP's {engine} engine can start",
        highlight=False,
    )
