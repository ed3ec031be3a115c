"""The command ``vamp``. Heavy imports wait inside the commands, so that help is instant and needs no vLLM."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from vamp_integration import compat
from vamp_integration.cli.doctor import doctor
from vamp_integration.cli.profile_routing import profile_routing
from vamp_integration.cli.replay import replay
from vamp_integration.cli.serve import serve
from vamp_integration.cli.status import status
from vamp_integration.replay.trace import TraceError
from vamp_profiles import ProfileError
from vamp_runtime.errors import ConfigError

USER_ERROR = 2

app = typer.Typer(
    name="vamp",
    help="Serve mixture-of-experts models in vLLM with KV cache that grows into expert memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(serve)
app.command()(replay)
app.command()(status)
app.command()(doctor)
app.command("profile-routing")(profile_routing)


@app.command("make-model")
def make_model(
    path: Annotated[Path, typer.Argument(help="New folder for the checkpoint.", show_default=False)],
    seed: Annotated[int, typer.Option(help="Seed of the weights; the same seed gives the same bytes.")] = 0,
    layers: Annotated[int, typer.Option(help="Layers, for Qwen3-Next and Qwen3.5 a multiple of 4.")] = 4,
    experts: Annotated[int, typer.Option(help="Experts per layer.")] = 32,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 4,
    family: Annotated[str, typer.Option(help="Family of models, such as mixtral.")] = "qwen3-next",
) -> None:
    """Write a tiny checkpoint with random weights, for trying things without a GPU."""
    from vamp_integration.tiny_model import TinyShape, write_checkpoint

    shape = TinyShape(layers=layers, experts=experts, top_k=top_k)
    typer.echo(write_checkpoint(path, seed, shape, family))


@app.command()
def version() -> None:
    """Print the versions of VAMP and of the vLLM it found."""
    typer.echo(f"vamp {metadata.version('vamp-moe')}")
    found = compat.installed_vllm()
    typer.echo(f"vllm {found}")
    compat.check_version(found)


def main() -> None:
    """Run the command line. What the user has to fix is one line on stderr and exit status 2."""
    try:
        app()
    except (ConfigError, ProfileError, TraceError) as error:
        print(f"vamp: error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
