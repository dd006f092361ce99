"""`kvreclaim serve`: a model behind OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim import demo_model
from kvreclaim.checks import require
from kvreclaim.cli import options as opt
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.model_names import model_of
from kvreclaim.cli.models_file import ModelsFile, check_given, presets_of
from kvreclaim.config import EngineConfig
from kvreclaim.engine.serving.started import StartedProcess
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.options import OBSERVABILITY
from kvreclaim.server.admin.logs import configure_logging
from kvreclaim.server.base.config import Preset, RouterConfig, ServerConfig
from kvreclaim.server.http.listener import bind

if TYPE_CHECKING:
    from kvreclaim.engine.serving.client import EngineClient
    from kvreclaim.engine.serving.messages import EngineSpec

SERVER, SEVERAL = "Server", "Several models"
LogLevel = Annotated[
    str, typer.Option(rich_help_panel=OBSERVABILITY, help="Log level: debug, info, warning or error.")
]
LogFormat = Annotated[
    str,
    typer.Option(rich_help_panel=OBSERVABILITY, help="Log format: json, text, or auto (text on a terminal)."),
]
logger = logging.getLogger(__name__)


@with_config
def serve(
    context: typer.Context,
    model: opt.ModelOption = None,
    *,
    config: Annotated[dict[str, Any], ConfigOptions(config=ServerConfig, panel=SERVER, build=dict)],
    engine: Annotated[
        EngineConfig,
        ConfigOptions(config=EngineConfig, defaults={"conversation_snapshots": True, **opt.THREADS}),
    ],
    compression: Annotated[Any, opt.Compression],
    routing: Annotated[RouterConfig, ConfigOptions(config=RouterConfig, panel=SEVERAL)],
    models: Annotated[str | None, ModelsFile] = None,
    calibrate: opt.Calibrate = False,
    log_level: LogLevel = "info",
    log_format: LogFormat = "auto",
    dtype: opt.DType = "auto",
    device: opt.Device = "auto",
) -> None:
    """Serve a model to OpenAI and Anthropic clients, with a chat at /."""
    check_given(context, several=models is not None)
    if models is not None:
        presets = presets_of(models, context, f"--log-format={log_format}", f"--log-level={log_level}")
        configure_logging(log_format, log_level, log_prompts=False)
        _serve_several(presets, config, routing, engine.memory_limit)
        return
    chosen: list[str] = []
    path = model_of(model, chosen.append)
    settings = _server_config(config, _name_of(path))
    _check_lasting(settings, engine)
    with (
        bind(settings.host, settings.port) as listener,
        StartedProcess() if settings.engine_process else nullcontext() as started,
    ):
        configure_logging(log_format, log_level, log_prompts=settings.log_prompts)
        for line in chosen:
            logger.info(line)
        logger.info("loading %s from %s", settings.served_model_name[0], path)
        with opt.starting(calibrates=False):
            from kvreclaim.engine.serving.messages import EngineSpec
            from kvreclaim.model.loader import hide_progress_bars

        hide_progress_bars()
        compressed, at_start = opt.with_calibration(compression, calibrate, logger.info)
        spec = EngineSpec(
            model=str(path),
            dtype=dtype,
            device=device,
            compression=compressed,
            calibrate=at_start,
            options=asdict(engine),
            prepare=partial(_prepare, log_format, log_level, log_prompts=settings.log_prompts),
        )
        served = _launched(spec, started)
        from kvreclaim.server.entry.run import serve as run

        if not run(served, settings, listener):
            raise typer.Exit(1)


def _serve_several(
    presets: list[Preset], config: dict[str, Any], routing: RouterConfig, limit_gib: float | None
) -> None:
    settings = ServerConfig(**config, served_model_name=tuple(each.names[0] for each in presets))
    with bind(settings.host, settings.port) as listener:
        from kvreclaim.server.router.app import serve
        from kvreclaim.server.router.fleet import Fleet

        serve(Fleet(presets, settings, routing, limit_gib), listener)


def _launched(spec: EngineSpec, started: StartedProcess | None) -> EngineClient:
    """Start the engine in this process, or in its own while this one imports the server."""
    if started is None:
        from kvreclaim.engine.serving.client import AsyncEngine

        return AsyncEngine(spec.load())
    from kvreclaim.engine.serving.process import ProcessEngine

    with opt.starting(calibrates=False):
        Thread(target=import_module, args=("kvreclaim.server.entry.run",), daemon=True).start()
        return ProcessEngine.launch(spec, started)


def _prepare(log_format: str, log_level: str, *, log_prompts: bool) -> None:
    """The engine's process, before its model is loaded."""
    from kvreclaim.model.loader import hide_progress_bars

    hide_progress_bars()
    configure_logging(log_format, log_level, log_prompts=log_prompts)


def _check_lasting(server: ServerConfig, engine: EngineConfig) -> None:
    """Raises: InvalidArgumentError if what is meant to outlive the process could not be found again."""
    places = {"kv_offloading_disk_path": engine.kv_offloading_disk_path, "responses_db": server.responses_db}
    keeps = [name for name, place in places.items() if place is not None]
    require(
        not (keeps and (server.api_keys or server.operator_key) and server.tenant_secret is None),
        f"{' and '.join(keeps)} is set, and so are keys, but tenant_secret is not: without it the names of "
        "tenants' files change at each start; pass --tenant-secret TEXT, or leave the path out.",
        "tenant_secret",
    )


def _name_of(path: str | Path) -> str:
    """The model's name for clients: as given, or the chosen directory's."""
    if path == demo_model():
        return "kvreclaim-demo"
    return path.name if isinstance(path, Path) else path


def _server_config(given: dict[str, Any], name: str) -> ServerConfig:
    template = given.get("chat_template")
    return ServerConfig(
        **{"served_model_name": (name,), **given, "chat_template": template and _text_of(template)}
    )


def _text_of(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"--chat-template {template} is no file of UTF-8 text ({type(error).__name__}); "
            "pass a Jinja template."
        ) from error
