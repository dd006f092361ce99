"""Write docs/compatibility.md from the table that the code checks."""

from __future__ import annotations

import re
from pathlib import Path

from kvreclaim.refusals import TABLE, Feature

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
HEAD = """# Compatibility

These features do not work together; all others do. The engine refuses a combination at its start or when a \
request is added. The rows are in `src/kvreclaim/refusals/`; after a change there, run \
`python scripts/compatibility_page.py`. [vllm.md](vllm.md) lists what the plugin refuses of vLLM's options.
"""
NOUNS = {
    "a policy": "the policy",
    "a ": "the format",
    **dict.fromkeys(("full_cache", "kv_", "mode", "drop_at", "priority"), "set"),
    "sparse": "",
    "sliding windows in the block": "a layer of the model",
}
"""How the page reads a name in braces, by how its feature begins; else it is the model."""


def noun(match: re.Match[str]) -> str:
    """The words in the place of a name in braces."""
    feature = Feature[match[1].upper()]
    return next((text for begin, text in NOUNS.items() if feature.startswith(begin)), "the model")


def page() -> str:
    """The table by feature."""
    by_feature: dict[str, list[str]] = {}
    for row in TABLE:
        first, *others = row.features
        reason = re.sub(r"(?:policy |kv_cache_dtype )?\{(\w+)(?:!r)?\}", noun, row.why).replace("  ", " ")
        why = "" if reason.endswith(" is given") else f": {reason}"
        by_feature.setdefault(first, []).append(f"- {', '.join(others)}{why}.")
    parts = [f"\n**{first}** with\n\n" + "\n".join(rows) for first, rows in by_feature.items()]
    return HEAD + "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
