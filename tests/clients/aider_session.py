"""A session of aider: .clients-env/aider/bin/python tests/clients/aider_session.py URL MODEL"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from session import FILE, play


def main(url: str, model: str) -> None:
    os.environ.update(OPENAI_API_BASE=f"{url}/v1", OPENAI_API_KEY="any")
    with tempfile.TemporaryDirectory() as home:
        os.chdir(home)
        os.environ["HOME"] = home
        from aider.coders import Coder
        from aider.io import InputOutput
        from aider.models import Model

        io = InputOutput(pretty=False, yes=True, fancy_input=False)
        served = Model(f"openai/{model}")
        served.max_chat_history_tokens = 10**6  # otherwise a thread summarises the history
        coder = Coder.create(
            main_model=served,
            edit_format="whole",
            io=io,
            fnames=[FILE],
            use_git=False,
            stream=False,
            map_tokens=0,
            suggest_shell_commands=False,
        )
        print(f"RESULT {play(url, Path(home), coder.run)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
