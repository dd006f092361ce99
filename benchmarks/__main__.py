"""python -m benchmarks CASE"""

from benchmarks import (  # noqa: F401 (importing them registers their commands)
    caching,
    compare_kvpress,
    prompts,
    sampling,
    steps,
    turns,
    vllm_turns,
    weights,
)
from benchmarks.runner import app

if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
