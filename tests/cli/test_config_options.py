"""Options from the fields of configs: each arrives, none is ignored, and none needs torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.plans import ServePlan, VllmPlan
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.eval import evaluate
from kvreclaim.cli.generate import generate
from kvreclaim.cli.main import OTHER_COMMANDS, app
from kvreclaim.cli.options import Compression
from kvreclaim.cli.run import run as talk
from kvreclaim.cli.serve import serve
from kvreclaim.compression_settings import CompressionSettings
from kvreclaim.config import EngineConfig
from kvreclaim.eval.plan import EvalPlan, TaskOptions
from kvreclaim.options import Setting, settings_of
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.server.base.config import RouterConfig, ServerConfig

runner = CliRunner()
CONFIGS = (EngineConfig, SamplingParams, CompressionSettings, ServerConfig)
PLANS = (DecodePlan, ServePlan, VllmPlan, EvalPlan, TaskOptions)
WORDS: dict[str, str] = {"eviction_policy": "slru", "kv_cache_dtype": "int8", "allowed_origins": "http://a"}
ALL = [
    pytest.param(config, setting, id=f"{config.__name__}.{setting.name}")
    for config in (*CONFIGS, *PLANS)
    for setting in settings_of(config).values()
    if setting.spec.help
]


def another(setting: Setting) -> Any:
    """A value that is not the default, within the bounds."""
    spec, default = setting.spec, setting.default
    if spec.choices:
        return next(choice for choice in spec.choices if choice != default)
    if setting.type is bool:
        return not default
    if setting.type is int:
        return (spec.low if default is None else default) + 1
    if setting.type is float:
        return spec.low if default == spec.high else ((default or 0.0) + spec.high) / 2
    if int in get_args(setting.type):
        return "7"
    return "7.5" if float in get_args(setting.type) else WORDS.get(setting.name, "a-word")


def run(group: ConfigOptions, *arguments: str) -> Any:
    """Return the config that a command gets for these arguments."""
    found: list[Any] = []

    def command(config) -> None:
        found.append(config)

    command.__annotations__ = {"config": Annotated[Any, group]}
    small = typer.Typer()
    small.command()(with_config(command))
    result = runner.invoke(small, list(arguments))
    assert result.exit_code == 0, result.output
    return found[0]


@pytest.mark.parametrize(("config", "setting"), ALL)
def test_every_option_arrives(config: type, setting: Setting) -> None:
    group = ConfigOptions(config=config, panel="p", build=dict)
    value = another(setting)
    for flag in setting.spec.flags or ("--" + setting.name.replace("_", "-"),):
        spelt = flag if value is not False else "--no-" + flag.removeprefix("--")
        arguments = [spelt] if isinstance(value, bool) else [flag, str(value)]
        got = run(group, *arguments)[setting.name]
        assert str(value) == str(got) or [*map(str, got)] == [value]


@pytest.mark.parametrize(
    ("flag", "text", "values"), [("contexts", " 7,9", (7, 9)), ("peers", "a, b,", ("a", "b"))]
)
def test_several_values_have_commas(flag: str, text: str, values: tuple) -> None:
    assert run(ConfigOptions(config=DecodePlan, build=dict), f"--{flag}", text)[flag] == values


def test_several_values_of_a_command_have_commas() -> None:
    group = ConfigOptions(config=DecodePlan, defaults={"contexts": (1, 2)}, build=dict)
    assert run(group)["contexts"] == (1, 2)


@pytest.mark.parametrize("config", [EngineConfig, SamplingParams, CompressionSettings])
def test_without_options_it_is_the_config_as_it_comes(config: type) -> None:
    assert run(ConfigOptions(config=config, panel="p")) == config()


def test_a_command_has_defaults_of_its_own() -> None:
    group = ConfigOptions(config=SamplingParams, panel="p", defaults={"max_tokens": 256, "temperature": 0.0})
    assert run(group) == SamplingParams(max_tokens=256, temperature=0.0)
    assert run(group, "--max-tokens", "3") == SamplingParams(max_tokens=3, temperature=0.0)


def test_what_is_not_given_differs_from_nought() -> None:
    assert run(Compression) is None
    config = run(Compression, "--kv-compression", "knorm", "--kv-sinks", "0", "--kv-protect-prompt")
    assert (config.policy, config.sinks, config.budget, config.protect_prompt) == ("knorm", 0, 2048, True)
    assert config.protect_system
    assert not run(Compression, "--no-kv-protect-system").protect_system


def test_a_mistake_is_one_sentence() -> None:
    result = runner.invoke(app, ["generate", "--prompt", "a", "--max-pinned-fraction", "1"])
    assert result.exit_code == 2
    assert "No such option" in result.output
    result = runner.invoke(app, ["generate", "--prompt", "a", "--top-p", "2"])
    assert result.exit_code == 2
    assert result.stderr == "error: top_p is 2.0; it must be a number from 0.0 to 1.0.\n"


@pytest.mark.parametrize(
    ("command", "groups", "others"),
    [
        (
            serve,
            {"config": ServerConfig, "engine": EngineConfig, "routing": RouterConfig},
            {"calibrate", "log_level", "log_format", "models", "context"},
        ),
        (
            generate,
            {"engine": EngineConfig, "params": SamplingParams},
            {"calibrate", "prompt", "chat", "session", "compress_prompt_at", "as_json"},
        ),
        (
            talk,
            {"engine": EngineConfig, "params": SamplingParams},
            {"calibrate", "prompt", "message", "named", "system", "verbose"},
        ),
    ],
)
def test_an_option_is_a_field_of_a_config_or_one_of_a_few(command, groups, others) -> None:
    groups = {**groups, "compression": CompressionSettings}
    fields = {f"{group}_{name}" for group, config in groups.items() for name in settings_of(config)}
    assert set(inspect.signature(command).parameters) - fields == {
        "model",
        "dtype",
        "device",
        "config_file",
        "help_all",
        *others,
    }


def test_eval_has_the_settings_of_its_plan_under_their_own_names() -> None:
    names = set(inspect.signature(evaluate).parameters)
    shared = {f"shared_{name}" for name in settings_of(CompressionSettings)}
    scored = {"shared_verify", "shared_verify_tokens", "shared_protect_system"}  # would change nothing
    assert shared - names == {"shared_policy", "shared_budget"} | scored


SCREEN = 24
PAGED = ("run", "generate", "serve")


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that takes options, with the words that start it."""
    yield path, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


def shown(*words: str) -> list[str]:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def names_in(lines: list[str]) -> set[str]:
    """The names of options in the left column, as they are printed."""
    left = [line[2:].split("  ")[0] for line in lines if line.startswith("  -")]
    return {word.rstrip(",") for text in left for word in text.split() if word.startswith("-")}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_name_is_whole_at_80_columns(path: tuple[str, ...]) -> None:
    command = COMMANDS[path]
    lines = shown(*path, "--help-all" if path[:1] in {(name,) for name in PAGED} else "--help")
    names = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    assert {name for name in names if name.startswith("-")} <= names_in(lines)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("name", PAGED)
def test_the_frequent_options_take_two_screens(name: str) -> None:
    short, whole = shown(name, "--help"), shown(name, "--help-all")
    frequent = names_in(short)
    assert len(short) <= 2 * SCREEN + 10
    assert 18 <= len([line for line in short if line.startswith("  -")]) <= 24
    assert frequent < names_in(whole)
    assert {"-c", "-t", "--kv-compression", "--kv-budget", "--device", "--help-all"} <= frequent


def test_serve_takes_two_screens() -> None:
    lines = shown("serve", "--help")
    assert len(lines) <= 2 * SCREEN
    assert {"-m", "--host", "--port", "--api-key", "--max-num-seqs"} <= names_in(lines)


@pytest.mark.parametrize(
    ("name", "arguments", "field"),
    [
        ("serve", ["-m", "a", "-c", "64", "-t", "2"], {"model": "a", "engine_max_model_len": 64}),
        ("generate", ["-m", "a", "-p", "b", "-n", "3"], {"prompt": "b", "params_max_tokens": 3}),
    ],
)
def test_short_options_are_those_of_llama_cpp(name: str, arguments: list[str], field: dict[str, Any]) -> None:
    context = COMMANDS[(name,)].make_context(name, arguments)
    assert field.items() <= context.params.items()


@pytest.mark.parametrize("command", ["serve", "run", "generate"])
@pytest.mark.parametrize("typed", [["-ngl", "99"], ["--ctx-size=4096"], ["-cnv"], ["--num_ctx", "9"]])
def test_options_of_other_engines_name_what_to_pass(command: str, typed: list[str]) -> None:
    result = runner.invoke(app, [command, *typed])
    assert result.exit_code == 2
    assert f"{typed[0].partition('=')[0].replace('_', '-')} is no option here; " in result.stderr


@pytest.mark.parametrize("name", OTHER_COMMANDS)
def test_commands_of_other_engines_name_what_to_do(name: str) -> None:
    result = runner.invoke(app, [name, "x"])
    assert (result.exit_code, f"{name} is no command here; " in result.stderr) == (2, True)


@pytest.mark.parametrize("name", ["serve", "eval", "plan"])
def test_the_first_word_is_the_model_and_named_once(name: str) -> None:
    (word,) = {
        COMMANDS[(name,)].make_context(name, typed).params["model"] for typed in (["a"], ["--model", "a"])
    }
    assert word == "a"
    result = runner.invoke(app, [name, "a", "--model", "a"])
    assert (result.exit_code, "the model is named twice" in result.stderr) == (2, True)


def test_a_value_may_read_like_an_option_of_another_engine() -> None:
    result = runner.invoke(app, ["generate", "--prompt", "-fa", "--top-p", "2"])
    assert result.stderr == "error: top_p is 2.0; it must be a number from 0.0 to 1.0.\n"


def test_an_option_of_another_engine_is_ours_where_a_command_has_it() -> None:
    assert "--batch-size is no option" not in runner.invoke(app, ["eval", "--batch-size", "0"]).output
    assert "--batch-size is no option" in runner.invoke(app, ["serve", "--batch-size", "9"]).output
