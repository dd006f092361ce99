"""Write docs/compatibility.md from the table that the code checks."""

from __future__ import annotations

from pathlib import Path

from kvreclaim.compatibility import TABLE

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
HEAD = """# Compatibility

These features do not work together; all others do. The engine refuses a combination at its start or when a \
request is added. The table is in `src/kvreclaim/compatibility.py`; after a change there, run \
`python scripts/compatibility_page.py`. [vllm.md](vllm.md) lists what the plugin refuses of vLLM's options.
"""


def page() -> str:
    """The table by feature. Braces stand for what was asked for."""
    by_feature: dict[str, list[str]] = {}
    for row in TABLE:
        first, *others = row.features
        reason = (row.reason or row.message).split(";")[0].rstrip(".")
        by_feature.setdefault(first, []).append(f"- {', '.join(others)}: {reason}.")
    parts = [f"\n**{first}** with\n\n" + "\n".join(rows) for first, rows in by_feature.items()]
    return HEAD + "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
