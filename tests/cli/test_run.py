"""`kvreclaim run`: its answers are those of LLM.chat, in the terminal, from a pipe and behind commands."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from typer.testing import CliRunner

from kvreclaim import LLM, CompressionConfig, SamplingParams, StructuredOutputsParams
from kvreclaim.cli.chat.commands import Commands, read_messages
from kvreclaim.cli.chat.dialogue import Dialogue
from kvreclaim.cli.chat.terminal import HINT, answer, converse, read_message
from kvreclaim.cli.main import app
from kvreclaim.cli.run import compression_for
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.parsers.pieces import Reasoning, Text, merged

LETTERS = tiny.tokenizer().encode("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
"""Tokens whose text is read back as the same tokens."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, allowed_token_ids=LETTERS)
SQUEEZED = CompressionConfig("knorm", budget=48, interval=16, sinks=2, recent=4)
TURNS = ("stop " * 30, "then the end " * 5, "and the stop")
END = 262


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A model with an end token, whose template opens no reasoning but reads it."""
    path = tiny.save_model("llama", tmp_path_factory.mktemp("speaker"), eos_token_id=END)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template += "{# <think> #}"
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(tiny_dir) -> LLM:
    return LLM(tiny_dir("llama"), num_blocks=200, conversation_snapshots=True)


@pytest.fixture
def talk(llm: LLM) -> Iterator[Callable[..., Dialogue]]:
    """A conversation in an engine that remembers nothing; all blocks come back."""

    def begin(compression: CompressionConfig | None = None, **options) -> Dialogue:
        return Dialogue(llm, GREEDY, compression, **options)

    yield begin
    llm.engine.reset_prefix_cache()
    llm.engine.step()
    llm.engine.memory.check()
    assert llm.stats().memory.in_use == 0


def lines(*given: str | type[BaseException]) -> Callable[[str], str]:
    """A keyboard that types these, then ctrl-D."""
    left = iter(given)

    def read(prompt: str) -> str:
        line = next(left, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


@pytest.mark.parametrize("compression", [None, SQUEEZED])
def test_the_same_turns_as_chat(compression, llm, tiny_dir, talk, capsys) -> None:
    dialogue = talk(compression, system="the")
    converse(dialogue, lines(*TURNS), Commands(dialogue))
    shown = capsys.readouterr()
    other = LLM(tiny_dir("llama"), num_blocks=200, conversation_snapshots=True)
    messages = [{"role": "system", "content": "the"}]
    for number, text in enumerate(TURNS):
        messages.append({"role": "user", "content": text})
        (output,) = other.chat(messages, GREEDY, compression)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        assert dialogue.messages[2 * number + 2]["content"] == output.outputs[0].text
        assert output.metrics.num_cached_tokens or not number
    assert dialogue.messages == messages
    assert shown.out == "".join(f"{turn['content']}\n" for turn in messages[2::2])
    figures = dialogue.last
    expected = output.metrics
    for name in ("num_prompt_tokens", "num_cached_tokens", "num_snapshot_tokens", "blocks_freed", "sinks"):
        assert getattr(figures.metrics, name) == getattr(expected, name), name
    assert bool(expected.num_snapshot_tokens) == (compression is not None)
    assert figures.num_tokens == len(output.prompt_token_ids) + len(output.outputs[0].token_ids)


@pytest.mark.parametrize("compression", [None, SQUEEZED])
def test_blocks_held_and_freed(compression, llm, talk) -> None:
    dialogue, freed, size = talk(compression), 0, llm.engine.memory.block_size
    for text in TURNS:
        list(dialogue.ask(text))
        figures = dialogue.last
        freed += figures.metrics.blocks_freed
        full = blocks_for(figures.num_tokens - 2, size)  # one step before the end
        assert figures.blocks_freed == freed
        if compression is None:
            assert (figures.blocks_held, freed) == (full, 0)
        else:
            assert figures.blocks_held <= (compression.budget + compression.interval) // size < full


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as in a terminal; a process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_an_answer_and_the_chat_goes_on(llm, talk, monkeypatch, capsys) -> None:
    steps, step = [], llm.engine.step

    def pressing():
        steps.append(None)
        if len(steps) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    dialogue = talk()
    dialogue.params = replace(GREEDY, max_tokens=100)
    monkeypatch.setattr(llm.engine, "step", pressing)
    converse(dialogue, lines(KeyboardInterrupt, "stop"), Commands(dialogue))
    assert len(steps) == 4
    assert dialogue.last.finish_reason == "abort"
    [_, stopped] = dialogue.turns
    (whole,) = llm.chat([{"role": "user", "content": "stop"}], dialogue.params)
    assert stopped["content"]
    assert whole.outputs[0].text.startswith(stopped["content"])
    shown = capsys.readouterr()
    assert shown.out == stopped["content"] + "\n"
    assert "ctrl-D or /bye leaves" in shown.err
    assert "interrupted" in shown.err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_answer_stopped_before_its_first_word_is_forgotten(talk) -> None:
    dialogue = talk()
    assert list(dialogue.ask("stop", lambda: True)) == []
    assert dialogue.turns == []


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["a"], "a"),
        (['"""a', "b", '  c"""'], "a\nb\n  c"),
        (['"""a"""'], "a"),
        (['"""', '"""'], "\n"),
        (['/system """a', 'b"""'], "/system a\nb"),
        (['say """x'], 'say """x'),
    ],
)
def test_a_message_of_several_lines(typed: list[str], message: str) -> None:
    assert read_message(lines(*typed)) == message


def test_commands(talk, tmp_path, capsys) -> None:
    dialogue, file = talk(), tmp_path / "talk.json"
    commands = Commands(dialogue)
    typed = (
        *("/system the end", "/set parameter temperature 0.5", "/set top_k 3", "/set stop x", "/set verbose"),
        *("/set seed 7", "/set ignore_eos true", "/set max_tokens none", "/set temperature 0"),
        *(
            "/set max_tokens 4",
            "stop",
            f"/save {file}",
            "/clear",
            "/show info",
            f"/load {file}",
            "/help",
            "/bye",
        ),
        "never asked",
    )
    converse(dialogue, lines(*typed), commands)
    shown = capsys.readouterr().err
    assert "error" not in shown
    assert commands.verbose
    assert dialogue.system == "the end"
    expected = replace(GREEDY, top_k=3, stop=["x"], seed=7, ignore_eos=True, max_tokens=4)
    assert dialogue.params == expected
    assert [turn["role"] for turn in dialogue.turns] == ["user", "assistant"]
    assert read_messages(file) == dialogue.messages
    for word in ("prompt eval rate", "blocks freed", "statistics", "kernels", *commands.known):
        assert word in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nope", "'/nope' is no command"),
        ("/clear all", "/clear takes nothing"),
        ("/set temperature hot", "temperature is 'hot'; it must be a number"),
        ("/set temperature -1", "temperature is -1.0"),
        ("/set n 2", "'n' is no option; /set lists them"),
        ("/set num_ctx 8192", "'num_ctx' is no option; start with --max-model-len"),
        ("/set top_k", "top_k has no value"),
        ("/save", "/save has no file"),
        ("/load no/such", "cannot be read as a conversation"),
        ("stop " * 600, "/clear begins anew"),
    ],
)
def test_a_mistake_is_one_sentence_and_changes_nothing(line: str, message: str, talk, capsys) -> None:
    dialogue = talk()
    converse(dialogue, lines(line), Commands(dialogue))
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ")
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out
    assert (dialogue.turns, dialogue.params) == ([], GREEDY)


def test_a_file_with_other_roles_is_refused(tmp_path) -> None:
    file = tmp_path / "talk.json"
    file.write_text('{"messages": [{"role": "tool", "content": ""}]}')
    with pytest.raises(InvalidArgumentError, match="other roles"):
        read_messages(file)


def test_reasoning_is_apart_and_given_back(directory: Path, capsys) -> None:
    llm = LLM(directory, num_blocks=64)
    structured = StructuredOutputsParams(choice=["<think>ab</think>cd"])
    params = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=structured)
    dialogue = Dialogue(llm, params, None)
    assert merged(dialogue.ask("stop")) == [Reasoning("ab"), Text("cd")]
    turn = {"role": "assistant", "content": "cd", "reasoning_content": "ab"}
    assert dialogue.turns[1] == turn
    capsys.readouterr()
    answer(dialogue, "stop", verbose=False)
    shown = capsys.readouterr()
    assert shown.out == "cd\n"
    assert shown.err.startswith("ab\n\n")


def test_without_a_chat_template_the_text_goes_on(llm, talk, monkeypatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    dialogue, text = talk(system="the"), "the\n"
    for message in ("stop", "then"):
        list(dialogue.ask(message))
        text += message if message == "stop" else f"\n{message}"
        (whole,) = llm.generate(text, GREEDY)
        assert dialogue.turns[-1]["content"] == whole.outputs[0].text
        text += whole.outputs[0].text
    assert dialogue.is_plain


def test_what_ends_an_answer_is_named(directory: Path, tiny_dir, talk) -> None:
    dialogue = talk()
    list(dialogue.ask("stop"))
    assert dialogue.last.ending == "cut off: max_tokens is 12"
    list(dialogue.ask("stop", lambda: dialogue.llm.stats().num_running > 0))
    assert dialogue.last.ending == "interrupted"
    dialogue.params = replace(GREEDY, stop=[dialogue.turns[1]["content"][2]])
    list(dialogue.ask("stop"))
    assert dialogue.last.ending == "stop"
    for limits, ending in (
        ({"max_model_len": 64, "num_blocks": 64}, "the context of 64 tokens is full"),
        ({"num_blocks": 5}, "the pool of 5 blocks is full"),
    ):
        small = Dialogue(LLM(tiny_dir("llama"), **limits), replace(GREEDY, max_tokens=None), None)
        list(small.ask("stop"))
        assert small.last.ending == f"cut off: {ending}"


def test_lines_from_the_keyboard(llm, talk, tmp_path, monkeypatch, capsys) -> None:
    input_ = pytest.importorskip("prompt_toolkit.input")
    output = pytest.importorskip("prompt_toolkit.output")
    from prompt_toolkit.application import create_app_session

    from kvreclaim.cli.chat.terminal import line_reader

    monkeypatch.setenv("KVRECLAIM_HOME", os.fspath(tmp_path / "home"))
    dialogue = talk()
    commands = Commands(dialogue)
    with (
        input_.create_pipe_input() as keyboard,
        create_app_session(input=keyboard, output=output.DummyOutput()),
    ):
        keyboard.send_text('\x03stpo\x1b[D\x7f\x1b[Cp\r/cl\t\r"""the\rend"""\r\x1b[A\x1b[A\x1b[A\r\x04')
        converse(dialogue, line_reader(commands.known), commands)
    assert [turn["content"] for turn in dialogue.turns[::2]] == ["the\nend"]
    history = tmp_path / "home" / "history"
    assert "+stop\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    assert HINT not in capsys.readouterr().out


def run(*arguments: object, **given):
    return CliRunner().invoke(app, ["run", *(str(argument) for argument in arguments)], **given)


def test_a_pipe_is_answered_once(directory: Path, monkeypatch) -> None:
    options = ("--temperature", 0, "--max-tokens", 8, "--num-blocks", 64, "--device", "cpu")
    piped = run(directory, *options, input="stop\n")
    assert piped.exit_code == 0, piped.output
    assert "no compression: " in piped.stderr
    assert "cut off: max_tokens is 8" in piped.stderr
    named = run("-m", directory, "-p", "stop", "-n", 8, *options[:2], *options[4:], input="")
    assert named.stdout == piped.stdout
    assert run("-m", directory, "stop", "-p", "stop", input="").exit_code == 2
    assert "has no statistics" in piped.stderr
    assert "conversation" in piped.stderr
    plain = SamplingParams(temperature=0.0, max_tokens=8)
    (whole,) = LLM(directory, num_blocks=64).chat([{"role": "user", "content": "stop"}], plain)
    assert piped.stdout == whole.outputs[0].text + "\n"
    both = run(directory, "the", "end", *options, "--kv-compression", "knorm", "--verbose", input="stop")
    assert both.exit_code == 0, both.output
    assert "compression: knorm, 2,048 tokens per KV head" in both.stderr
    assert "prompt eval rate" in both.stderr
    for given, message in (("", "standard input is empty"), (b"\xff", "standard input is no utf-8 text")):
        refused = run(directory, input=given)
        assert refused.exit_code == 2
        assert refused.stderr.startswith(f"error: {message}")


def test_compression_is_auto_where_there_are_statistics(real_dir: Path, capsys) -> None:
    llm = LLM(real_dir, num_blocks=64)
    config = compression_for(llm)
    assert config == llm.resolved(CompressionConfig())
    printed = capsys.readouterr().err
    assert printed.startswith(f"compression: {config.policy}, 2,048 tokens per KV head; ")
    assert printed.endswith("--kv-compression full keeps every token\n")
