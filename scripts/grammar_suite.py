"""JSON Schema's own test suite by llguidance, as the engine uses it, and by xgrammar.

python scripts/grammar_suite.py JSON-Schema-Test-Suite/tests/draft2020-12 --model DIR

Needs `pip install xgrammar` and a copy of github.com/json-schema-org/JSON-Schema-Test-Suite.

A value is accepted if the grammar takes it with its keys in some order. A schema that cannot be compiled is
refused, and none of its values is counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import xgrammar

from kvreclaim.bench.common import Columns, Row, cells, markdown, seconds
from kvreclaim.engine.sampling.grammar import Grammars
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.loader import load_tokenizer
from kvreclaim.structured_outputs import StructuredOutputsParams

MOST_ORDERS = 24
"""Of the keys of one value that are tried."""


class State(Protocol):
    """One output by a grammar."""

    def mask(self) -> None: ...

    def take(self, token: int) -> bool: ...

    def may_end(self) -> bool: ...


class Llguidance:
    """As the engine uses it."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._grammars = Grammars(tokenizer, vocab_size, frozenset({tokenizer.eos_token_id}))
        self._words = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)

    def compile(self, schema: str) -> Any:
        return self._grammars.matcher(StructuredOutputsParams(json=schema))

    def begin(self, compiled: Any) -> State:
        self._state = compiled.deep_copy()
        return self

    def mask(self) -> None:
        self._state.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)

    def take(self, token: int) -> bool:
        return bool(self._state.consume_token(token))

    def may_end(self) -> bool:
        return bool(self._state.is_accepting())


class Xgrammar:
    """Without strict_mode, which forbids what a schema does not name."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words = xgrammar.allocate_token_bitmask(1, vocab_size)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema, strict_mode=False)

    def begin(self, compiled: Any) -> State:
        self._state = xgrammar.GrammarMatcher(compiled)
        return self

    def mask(self) -> None:
        self._state.fill_next_token_bitmask(self._words)

    def take(self, token: int) -> bool:
        return bool(self._state.accept_token(token))

    def may_end(self) -> bool:
        return bool(self._state.is_completed())


LIBRARIES = {"llguidance": Llguidance, "xgrammar": Xgrammar}


def orders(value: Any) -> Iterator[Any]:
    """The value with its keys in each order."""
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for parts in itertools.product(*(list(orders(value[key])) for key in keys)):
                yield dict(zip(keys, parts, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(orders(each)) for each in value)))
    else:
        yield value


def accepts(library: Any, compiled: Any, ids: list[int], masks: list[float]) -> bool:
    """Whether it takes these tokens, and then an end. masks: seconds of each mask, added to"""
    state = library.begin(compiled)
    for token in ids:
        masks.append(seconds(state.mask))
        if not state.take(token):
            return False
    return bool(state.may_end())


def judge(name: str, library: Any, tokenizer: Any, suite: list[dict[str, Any]]) -> Row:
    counts = dict.fromkeys(("refused", "valid", "invalid", "wrongly_refused", "wrongly_accepted"), 0)
    compiles: list[float] = []
    masks: list[float] = []
    for group in suite:
        made: list[Any] = []
        try:
            spent = seconds(lambda g=group, m=made: m.append(library.compile(json.dumps(g["schema"]))))
        except (InvalidArgumentError, RuntimeError, ValueError):
            counts["refused"] += 1
            continue
        compiles.append(spent)
        for test in group["tests"]:
            texts = (json.dumps(each) for each in itertools.islice(orders(test["data"]), MOST_ORDERS))
            accepted = any(accepts(library, made[0], tokenizer.encode(text), masks) for text in texts)
            counts["valid" if test["valid"] else "invalid"] += 1
            if accepted != test["valid"]:
                counts["wrongly_accepted" if accepted else "wrongly_refused"] += 1
    return {
        "library": name,
        "schemas": len(suite),
        **counts,
        "compile_ms": 1e3 * median(compiles),
        "most_compile_ms": 1e3 * max(compiles),
        "mask_ms": 1e3 * median(masks),
        "most_mask_ms": 1e3 * max(masks),
    }


COLUMNS: Columns = {
    "library": "{library}",
    "schemas": "{schemas}",
    "refused with an error": "{refused}",
    "wrongly refused, of valid": "{wrongly_refused} of {valid}",
    "wrongly accepted, of invalid": "{wrongly_accepted} of {invalid}",
    "compile, ms": "{compile_ms:.2f} (≤ {most_compile_ms:.0f})",
    "mask, ms": "{mask_ms:.3f} (≤ {most_mask_ms:.1f})",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", type=Path, help="folder of one draft's tests")
    parser.add_argument(
        "--model", type=Path, required=True, help="directory with a tokenizer and a config.json"
    )
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    args = parser.parse_args()
    suite = [group for path in sorted(args.suite.glob("*.json")) for group in json.loads(path.read_text())]
    tokenizer = load_tokenizer(args.model)
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    rows = [
        judge(name, LIBRARIES[name](tokenizer, vocab_size), tokenizer, suite)
        for name in args.libraries.split(",")
    ]
    print(markdown(COLUMNS, cells(COLUMNS, rows)))


if __name__ == "__main__":
    main()
