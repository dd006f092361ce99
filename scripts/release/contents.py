"""What a wheel holds besides our own code, and under which licence: the bill of materials says this."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

APACHE = "Apache-2.0"


@dataclass(frozen=True)
class Part:
    """Something of a wheel that has a maker, a version or a licence of its own."""

    name: str
    kind: str
    """Of CycloneDX: library, data, machine-learning-model or file."""
    licence: str
    """An SPDX expression."""
    source: str
    files: tuple[str, ...] = ()
    """Patterns of paths in the wheel; none for what is compiled into the native module."""
    version: str | None = None


PAGE = (
    "charts.js",
    "colours.js",
    "compare.js",
    "completion.js",
    "feed.js",
    "icon.svg",
    "index.html",
    "main.js",
    "noscript.css",
    "pool.js",
    "requests.js",
    "sharing.js",
    "style.css",
    "theme.js",
    "tiers.js",
)
"""By name, so that a script of somebody else is noticed."""

PARTS = (
    Part(
        "kvreclaim-demo-model",
        "machine-learning-model",
        APACHE,
        "trained from nothing by scripts/train_demo_model.py on made-up sequences",
        ("kvreclaim/assets/demo_model/*",),
    ),
    Part(
        "SmolLM2-135M-Instruct-statistics",
        "data",
        APACHE,
        "measured on HuggingFaceTB/SmolLM2-135M-Instruct (Apache-2.0) by `kvreclaim calibrate`; no weights",
        ("kvreclaim/assets/SmolLM2-135M-Instruct.safetensors",),
    ),
    Part(
        "model-shapes",
        "data",
        APACHE,
        "shapes of public models (numbers of layers, heads and dims), which `kvreclaim plan` reads",
        ("kvreclaim/plan/data/models/*.json",),
    ),
    Part(
        "model-defaults",
        "data",
        APACHE,
        "what config.json may leave out, written by scripts/plan_defaults.py from transformers (Apache-2.0)",
        ("kvreclaim/plan/data/defaults.json",),
    ),
    Part(
        "cards",
        "data",
        APACHE,
        "sizes and speeds from vendors' data sheets",
        ("kvreclaim/plan/data/cards.toml",),
    ),
    Part(
        "page",
        "file",
        APACHE,
        "our own page of the server and of the plugin for vLLM; no script, font or style of anyone else",
        ("kvreclaim/server/page/examples.json", *(f"kvreclaim/page/static/{name}" for name in PAGE)),
    ),
    Part(
        "report-template",
        "file",
        APACHE,
        "our own, for `kvreclaim eval`",
        ("kvreclaim/eval/templates/*.jinja",),
    ),
    Part(
        "vllm-names",
        "data",
        APACHE,
        "names and signatures of vLLM (Apache-2.0) that the plugin compares with what is installed",
        ("kvreclaim/integrations/vllm/*/expected.txt",),
    ),
)

COMPILED = (
    Part("nanobind", "library", "BSD-3-Clause", "pkg:pypi/nanobind"),
    Part("robin-map", "library", "MIT", "pkg:github/Tessil/robin-map; inside nanobind"),
    Part(
        "libc++",
        "library",
        "Apache-2.0 WITH LLVM-exception",
        "LLVM's, with libc++abi and libunwind, through zig",
    ),
    Part("compiler-rt", "library", "MIT", "zig's"),
)
"""Linked into the native module."""

OURS = ("*.py", "*/py.typed", "*/build.json", "*/spec/policies.json", "*/_native*.so")
"""Our own code and what is made of it."""


def part_of(path: str) -> Part | None:
    """The part that a wheel's file belongs to; None for our own code and the wheel's metadata.

    Raises: LookupError if the table does not know it.
    """
    found = [part for part in PARTS if any(fnmatch(path, pattern) for pattern in part.files)]
    if found:
        return found[0]
    if ".dist-info/" in path or any(fnmatch(path, pattern) for pattern in OURS):
        return None
    raise LookupError(
        f"the wheel has {path}, which no part in scripts/release/contents.py names; add it there."
    )
