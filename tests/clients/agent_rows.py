"""Whole sessions of coding agents: aider by OpenAI's API, and a loop of Anthropic's client with tools."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rows import At, Rows, check
from session import FILE, play

ROWS = Rows()
AIDER = Path(sys.executable).parent.parent / "aider" / "bin" / "python"
LIMIT_S = 1500


@ROWS.add("aider", "six edits, one after the other")
def aider(at: At) -> str:
    check(AIDER.exists(), "aider is not installed")
    command = [AIDER, Path(__file__).with_name("aider_session.py"), at.url, at.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    _, mark, figures = done.stdout.rpartition("RESULT ")
    check(mark, (done.stderr or done.stdout)[-180:])
    return figures.strip()


WRITE: dict[str, Any] = {
    "name": "write_file",
    "description": "Write the whole new text of the file.",
    "input_schema": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    },
}


@ROWS.add("anthropic", "six edits by a tool, one after the other")
def anthropic_tools(at: At) -> str:
    from anthropic import Anthropic

    client = Anthropic(base_url=at.url, api_key="any", max_retries=0, timeout=LIMIT_S)
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / FILE
        messages: list[Any] = []
        results: list[Any] = []

        def turn(instruction: str) -> None:
            request = f"The file {FILE} is:\n\n{path.read_text()}\n\n{instruction}"
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": request}]})
            reply = client.messages.create(
                model=at.model,
                max_tokens=768,
                extra_body={"temperature": 0},
                system="You edit a Python file. Call write_file with its whole new text.",
                tools=[WRITE],
                tool_choice={"type": "any"},
                messages=messages,
            )
            messages.append({"role": "assistant", "content": reply.content})
            (call,) = (each for each in reply.content if each.type == "tool_use")
            path.write_text(call.input["text"])
            results[:] = [{"type": "tool_result", "tool_use_id": call.id, "content": "Written."}]

        return play(at.url, Path(home), turn)


if __name__ == "__main__":
    ROWS.main()
