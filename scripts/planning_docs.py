"""Write what `kvreclaim plan` prints into docs/planning.md, from the repository's root."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
BLOCK = re.compile(r"```console\n\$ (kvreclaim plan .*)\n(?:(?!```)(?:.*\n))*```")


def printed(found: re.Match[str]) -> str:
    """The block again, with the command's output of today."""
    done = subprocess.run(shlex.split(found[1]), capture_output=True, text=True, check=True)
    return f"```console\n$ {found[1]}\n{done.stdout}```"


if __name__ == "__main__":
    PAGE.write_text(BLOCK.sub(printed, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
