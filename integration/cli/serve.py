"""``vamp serve``: vLLM's OpenAI server with VAMP switched on.

The same without this command, for instance where a launcher owns the command line::

    python -m vllm.entrypoints.openai.api_server --model MODEL --load-format vamp \
        --additional-config '{"vamp": {"max_offload_ratio": 0.25}}'

What this command adds: the two options above are set for you, a ``--load-format`` you give becomes the format
VAMP reads the checkpoint with, and an engine that VAMP cannot work with is refused in one line before it
starts.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from vamp_integration import compat, settings
from vamp_integration.config_errors import as_config_errors
from vamp_runtime.errors import ConfigError


def serve(
    context: typer.Context,
    max_offload_ratio: Annotated[
        float | None,
        typer.Option(help="Largest share of each layer's experts that may leave GPU memory, 0 to 1."),
    ] = None,
    peer_hbm_gib: Annotated[
        float | None,
        typer.Option(help="HBM of another GPU, in GiB, for the warmest of the experts that may leave."),
    ] = None,
    vamp_policy: Annotated[str | None, typer.Option(help="Policy profile: a name or a TOML file.")] = None,
    vamp_hardware: Annotated[
        str | None, typer.Option(help="Hardware profile: a name or a TOML file.")
    ] = None,
    vamp_model: Annotated[str | None, typer.Option(help="Model profile: a name or a TOML file.")] = None,
) -> None:
    """Serve a model: vamp serve MODEL [any option of `vllm serve`].

    Every VAMP setting can also be given as --additional-config.vamp.NAME VALUE.
    """
    given = {
        "max_offload_ratio": max_offload_ratio,
        "peer_hbm_gib": peer_hbm_gib,
        "policy": vamp_policy,
        "hardware": vamp_hardware,
        "model": vamp_model,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    settings.parse(chosen)
    compat.check_version(compat.installed_vllm())
    with _quiet():
        args = parse_arguments(context.args)
        enable_vamp(args, chosen)
        check_arguments(args)
    _run(args)


def parse_arguments(argv: list[str]) -> Namespace:
    """Parse ``argv`` as ``vllm serve`` does, but raise ``ConfigError`` where that prints its usage."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.platforms import current_platform
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(" ".join(message.split()))

    cli_env_setup()  # type: ignore[no-untyped-call]
    parser = make_arg_parser(Parser(prog="vamp serve"))  # type: ignore[no-untyped-call]
    parser.set_defaults(model=None, enforce_eager=None)
    with as_config_errors():
        args: Namespace = parser.parse_args(argv)
    if args.enforce_eager is None:
        # On a CPU torch.compile takes minutes at every first start, so there it has to be asked for.
        compiler = ("optimization_level", "compilation_config")
        untouched = all(getattr(args, name) is parser.get_default(name) for name in compiler)
        args.enforce_eager = current_platform.is_cpu() and untouched
    args.model = args.model_tag or args.model
    if args.model is None:
        raise ConfigError("MODEL is missing; give a name or a folder, as in: vamp serve Qwen/Qwen3-30B-A3B")
    if args.model.startswith(("/", ".", "~")) and not Path(args.model).expanduser().is_dir():
        raise ConfigError(
            f"MODEL: there is no folder {args.model}; give one with config.json and weights in it"
        )
    return args


def enable_vamp(args: Namespace, chosen: dict[str, Any]) -> None:
    """Set load format and VAMP settings in ``args``; ``chosen`` wins over the user's ``--additional-config``.

    A load format other than ``auto`` or ``vamp`` becomes the inner format, which reads the checkpoint.
    """
    if args.load_format not in ("auto", settings.LOAD_FORMAT):
        extra = _table("--model-loader-extra-config", args.model_loader_extra_config)
        args.model_loader_extra_config = {**extra, "inner": args.load_format}
    args.load_format = settings.LOAD_FORMAT
    additional = _table("--additional-config", args.additional_config)
    vamp = {**_table("--additional-config vamp", additional.get(settings.KEY, {})), **chosen}
    settings.parse(vamp)
    args.additional_config = {**additional, settings.KEY: vamp}


def check_arguments(args: Namespace) -> None:
    """Raise ``ConfigError`` where vLLM or VAMP would refuse ``args``; nothing is started."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.usage.usage_lib import UsageContext

    from vamp_integration.refusals import check_engine

    for name, refused in (
        ("--headless", args.headless),
        ("--grpc", args.grpc),
        ("--api-server-count", (args.api_server_count or 1) > 1),
    ):
        if refused:
            raise ConfigError(f"{name}: vamp serve runs one HTTP server beside one engine; leave it out")
    with as_config_errors():
        validate_parsed_serve_args(args)
        config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    check_engine(config)


def _run(args: Namespace) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.logger import configure_logging_from_args

    configure_logging_from_args(args)
    uvloop.run(run_server(args))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold log lines back while options are checked: the server logs them again when it starts."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _table(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: {value!r} is not a JSON object; give one such as '{{\"name\": 1}}'")
    return value
