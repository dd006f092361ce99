"""Programs that talk to a server of OpenAI's API: llm, lm-eval, aider."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rows import At, Rows, check

ROWS = Rows()
BIN = Path(sys.executable).parent
AIDER = BIN.parent / "aider" / "bin" / "aider"


def run(*command: object, **options: Any) -> str:
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, timeout=400, check=False, **options
    )
    check(done.returncode == 0, (done.stderr or done.stdout)[-180:])
    return done.stdout


@ROWS.add("llm", "one question")
def llm(at: At) -> None:
    with tempfile.TemporaryDirectory() as home:
        entry = f"- model_id: served\n  model_name: {at.model}\n  api_base: {at.v1}\n"
        (Path(home) / "extra-openai-models.yaml").write_text(entry)
        env = {**os.environ, "LLM_USER_PATH": home}
        check(run(BIN / "llm", "-m", "served", "-o", "max_tokens", 8, "Name a city.", env=env), "nothing")


@ROWS.add("lm-eval", "local-completions: log-likelihoods and text")
def lm_eval_completions(at: At) -> None:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        base_url=f"{at.v1}/completions",
        model=at.model,
        tokenizer=at.tokenizer,
        tokenizer_backend="huggingface",
    )
    requests: list[Any] = [
        SimpleNamespace(args=("The capital of France is", word)) for word in (" Paris", " red")
    ]
    found = model.loglikelihood(requests)
    check(len(found) == 2 and all(likelihood < 0 for likelihood, _ in found), found)
    requests = [SimpleNamespace(args=("The capital", {"until": ["\n"], "max_gen_toks": 8}))]
    check(len(model.generate_until(requests)) == 1, "no text")


@ROWS.add("lm-eval", "local-chat-completions")
def lm_eval_chat(at: At) -> None:
    from lm_eval.models.openai_completions import LocalChatCompletion

    model = LocalChatCompletion(base_url=f"{at.v1}/chat/completions", model=at.model)
    history = model.apply_chat_template([{"role": "user", "content": "Name a city."}])
    requests: list[Any] = [SimpleNamespace(args=(history, {"until": ["\n"], "max_gen_toks": 8}))]
    check(len(model.generate_until(requests)) == 1, "no text")


@ROWS.add("aider", "a question about a file")
def aider(at: At) -> None:
    check(AIDER.exists(), "aider is not installed")
    with tempfile.TemporaryDirectory() as home:
        (Path(home) / "a.py").write_text("x = 1\n")
        env = {**os.environ, "OPENAI_API_BASE": at.v1, "HOME": home}
        quiet = ("--no-git", "--no-stream", "--yes-always", "--no-check-update", "--no-analytics")
        model = ("--model", f"openai/{at.model}", "--no-show-model-warnings", "--map-tokens", 0)
        ask = ("--message", "/ask What is x?", "a.py")
        output = run(AIDER, *quiet, *model, *ask, cwd=home, env=env)
        check(re.search(r"Tokens: .* received", output), output[-200:])  # it exits with 0 whatever happens


if __name__ == "__main__":
    ROWS.main()
