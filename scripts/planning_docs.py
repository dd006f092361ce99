"""Write what `kvreclaim plan` prints into the documents that show it, from the repository's root."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

DOCS = [Path(__file__).parents[1] / "docs" / name for name in ("planning.md", "evidence.md")]
BLOCK = re.compile(r"```console\n\$ (kvreclaim plan .*)\n(?:(?!```)(?:.*\n))*```")


def printed(found: re.Match[str]) -> str:
    """The block again, with the command's output of today."""
    done = subprocess.run(shlex.split(found[1]), capture_output=True, text=True, check=True)
    return f"```console\n$ {found[1]}\n{done.stdout}```"


if __name__ == "__main__":
    for document in DOCS:
        document.write_text(BLOCK.sub(printed, document.read_text(encoding="utf-8")), encoding="utf-8")
