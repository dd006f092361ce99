"""Write docs/compatibility.md from the table that the code checks."""

from __future__ import annotations

import re
from pathlib import Path

from kvreclaim.refusals import Feature
from kvreclaim.refusals.features import Kind
from kvreclaim.refusals.table import ROWS, UNTESTED

PAGE = Path(__file__).parent.parent / "docs" / "compatibility.md"
HEAD = """# Compatibility

These features exclude each other; tests cover other pairs. [vllm.md](vllm.md) lists what the plugin refuses.
"""
NOUNS = {
    "a policy": "the policy",
    "a ": "the format",
    **dict.fromkeys(("full_cache", "kv_", "mode", "drop_at", "compress", "priority"), "set"),
    "sparse": "",
    "sliding windows in the block": "a layer of the model",
}
"""How the page reads a name in braces, by how its feature begins; else it is the model."""


def noun(match: re.Match[str]) -> str:
    """The words in the place of a name in braces."""
    feature = Feature[match[1].upper()]
    return next((text for begin, text in NOUNS.items() if feature.startswith(begin)), "the model")


def page() -> str:
    """The table by feature, without rows about options alone; what no test covers is one line."""
    by_feature: dict[str, list[str]] = {}
    for row in ROWS:
        first, *others = row.features
        if any(feature.kind is not Kind.STATE for feature in row.features):
            reason = re.sub(r"(?:policy |kv_cache_dtype )?\{(\w+)(?:!r)?\}", noun, row.why).replace("  ", " ")
            why = "" if reason.endswith(" is given") else f": {reason}"
            by_feature.setdefault(first, []).append(f"- {', '.join(others)}{why}.")
    for first, rest in UNTESTED.items():
        by_feature.setdefault(first, []).append(f"- untested: {', '.join(rest)}.")
    parts = [f"\n**{first}** with\n\n" + "\n".join(rows) for first, rows in by_feature.items()]
    return HEAD + "\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
