"""Write docs/compatibility.md from the table that the code checks."""

from __future__ import annotations

from pathlib import Path

from kvreclaim.compatibility import TABLE

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
HEAD = """# Compatibility

These features do not work together; all others do. The engine refuses a combination at its start or when a \
request is added. Its message says what to change. The engine, the server, the command line, the planner and \
the vLLM plugin check the table in `src/kvreclaim/compatibility.py`; after a change there, run \
`python scripts/compatibility_page.py`. [vllm.md](vllm.md) lists what the plugin refuses of vLLM's options.

| feature | with | why |
|---|---|---|
"""


def page() -> str:
    """The table by feature. Braces stand for what was asked for."""
    order = list(dict.fromkeys(row.features[0] for row in TABLE))
    lines, last = [], None
    for row in sorted(TABLE, key=lambda row: order.index(row.features[0])):
        first, *others = row.features
        lines.append(f"| {'' if first is last else first} | {', '.join(others)} | {_reason(row.message)} |")
        last = first
    return HEAD + "\n".join(lines) + "\n"


def _reason(message: str) -> str:
    """The message without its remedy."""
    return message.split(";")[0].rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(page())
