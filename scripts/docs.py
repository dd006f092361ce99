"""Write the generated parts of the documentation and of the package.

python scripts/docs.py compatibility           docs/compatibility.md, from the table that the code checks
python scripts/docs.py planning                the console blocks of docs/planning.md
python scripts/docs.py defaults                defaults of transformers' configs, for `kvreclaim plan`
python scripts/docs.py examples                the prompts that the live page offers
python scripts/docs.py policies REPORT...      print the tables of docs/policies.md, from `kvreclaim eval`
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import subprocess
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from kvreclaim import LLM, demo_model
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.text.codes import HEAD, draw_facts, fact_text
from kvreclaim.eval.text.prose import framed, spread
from kvreclaim.plan.families import COMPOSITE, DEFAULTS_FILE, FAMILIES, OTHER_NAMES
from kvreclaim.refusals import Feature
from kvreclaim.refusals.features import Kind
from kvreclaim.refusals.table import ROWS, UNTESTED

ROOT = Path(__file__).parents[1]
COMPATIBILITY, PLANNING = ROOT / "docs/compatibility.md", ROOT / "docs/planning.md"
EXAMPLES = ROOT / "src/kvreclaim/server/page/examples.json"
COMPATIBILITY_HEAD = """# Compatibility

These features do not work together; a test runs each other pair (`tests/supported_pairs.txt`). The engine \
refuses a combination at its start or when a request is added. After a change in `src/kvreclaim/refusals/`, \
run `python scripts/docs.py compatibility`. [vllm.md](vllm.md) lists what the plugin refuses of \
vLLM's options.
"""
NOUNS = {
    "a policy": "the policy",
    "a ": "the format",
    **dict.fromkeys(("full_cache", "kv_", "drop_at", "compress", "priority"), "set"),
    "sparse": "",
    "sliding windows in the block": "a layer of the model",
}
"""Text for a name in braces, by how its feature begins; else it is the model."""


def _noun(match: re.Match[str]) -> str:
    """Return the text for a name in braces."""
    feature = Feature[match[1].upper()]
    return next((text for begin, text in NOUNS.items() if feature.startswith(begin)), "the model")


def compatibility_page() -> str:
    """Return the table by feature, without rows about options alone or HTTP fields; what no test covers is
    one line."""
    by_feature: dict[str, list[str]] = {}
    for row in ROWS:
        first, *others = row.features
        kinds = {feature.kind for feature in row.features}
        if kinds != {Kind.STATE} and Kind.FIELD not in kinds:
            reason = re.sub(r"(?:policy |kv_cache_dtype )?\{(\w+)(?:!r)?\}", _noun, row.why).replace(
                "  ", " "
            )
            why = "" if reason.endswith(" is given") else f": {reason}"
            by_feature.setdefault(first, []).append(f"- {', '.join(others)}{why}.")
    for first, rest in UNTESTED.items():
        by_feature.setdefault(first, []).append(f"- untested: {', '.join(rest)}.")
    parts = [f"\n**{first}** with\n\n" + "\n".join(rows) for first, rows in by_feature.items()]
    return COMPATIBILITY_HEAD + "\n".join(parts) + "\n"


BLOCK = re.compile(r"```console\n\$ (kvreclaim plan .*)\n(?:(?!```)(?:.*\n))*```")


def _printed(found: re.Match[str]) -> str:
    """Return the block with the command's output of today."""
    done = subprocess.run(shlex.split(found[1]), capture_output=True, text=True, check=True)
    return f"```console\n$ {found[1]}\n{done.stdout}```"


def planning_page() -> str:
    """Return docs/planning.md with what `kvreclaim plan` prints today, run from the repository's root."""
    return BLOCK.sub(_printed, PLANNING.read_text(encoding="utf-8"))


def plan_defaults() -> dict[str, dict[str, Any]]:
    """Return defaults by model_type; of a composite one also those of its language model, which a config may
    lack."""
    found = {kind: _of_class(CONFIG_MAPPING[kind]) for kind in FAMILIES}
    for kind, part in COMPOSITE.items():
        made = CONFIG_MAPPING[kind]
        found[kind] = _numbers(made.default_config_fields())
        found[kind][part.key] = _numbers(made.sub_configs_defaults[part.key].init_kwargs)
    return found


def _of_class(made: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return a class's defaults, and its other names of fields."""
    numbers = _numbers(made.default_config_fields())
    return numbers | ({OTHER_NAMES: made.attribute_map} if made.attribute_map else {})


def _numbers(fields: Mapping[str, Any]) -> dict[str, int | None]:
    """Return a class's own integers, booleans and Nones, without token ids."""
    general = PreTrainedConfig.default_config_fields()
    return {
        key: value
        for key, value in fields.items()
        if isinstance(value, int | None)
        and (key not in general or key == "tie_word_embeddings")
        and "token_i" not in key
    }


def defaults_file() -> str:
    """Return the defaults as JSON, a line for each model_type."""
    lines = (f" {json.dumps(kind)}: {json.dumps(found)}" for kind, found in plan_defaults().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


DEMO = (
    ("multi_query", 2048, 2, "questions about facts that stand far back"),
    ("variable_tracking", 2048, 2, "variables followed through chains of assignments"),
    ("multi_query", 2048, 3, "other facts, other questions"),
)
"""(task, tokens, seed, title); the demo model answers them with a tenth of its cache."""
TEXTS = ((1, 80, 6, "page"), (4, 100, 4, "c"), (6, 120, 6, "c"), (12, 150, 6, "page"))
"""(codes, sentences, digits, seed), the easiest first."""
DEMO_BUDGET, TEXT_BUDGET = 256, 384


def page_examples() -> dict[str, list[dict[str, Any]]]:
    """Return the prompts. An entry has prompt, max_tokens, budget and a title; the demo model's have the
    right answer, the others a text that a right answer contains."""
    decode = LLM(demo_model(), num_blocks=16).tokenizer.decode
    demo = []
    for task, num_tokens, seed, title in DEMO:
        example = DEMO_TASKS[task].make(num_tokens).sample(seed)
        answer = decode(list(example.trace[:-1]))  # the last token ends the text
        entry = _entry(title, decode(list(example.prompt)), len(example.trace), DEMO_BUDGET)
        demo.append(entry | {"answer": answer})
    return {"demo": demo, "text": [_text(*text) for text in TEXTS]}


def _text(num_codes: int, num_sentences: int, num_digits: int, seed: str) -> dict[str, Any]:
    rng = random.Random(seed)
    facts = [(name, code[:num_digits]) for name, code in draw_facts(rng, num_codes)]
    depths = [0.5, *(rng.random() for _ in facts[1:])]
    story, places = spread(rng, [fact_text(*fact) for fact in facts], depths, num_sentences)
    name, code = facts[0]
    tail = f"\n\nWhat is the access code of {name}? Answer with the sentence that says it."
    codes = f"{num_codes} access codes" if num_codes > 1 else "one access code"
    title = f"{codes} in {num_sentences} sentences"
    return _entry(title, framed(HEAD, story, tail, places[:1])[0], 40, TEXT_BUDGET) | {"contains": code}


def _entry(title: str, prompt: str, max_tokens: int, budget: int) -> dict[str, Any]:
    return {"title": title, "prompt": prompt, "max_tokens": max_tokens, "budget": budget}


Row = dict[str, object]


def _rows_of(rows: Iterable[Row], policy: str, fraction: float, task: str | None = None) -> list[Row]:
    """The finished rows of a policy at a fraction; the full cache has one row for all fractions."""
    return [
        row
        for row in rows
        if row["policy"] == policy
        and row["status"] == "ok"
        and row["accuracy"] is not None
        and (policy == "full" or row["fraction"] == fraction)
        and task in (None, row["task"])
    ]


def _average(found: list[Row], field: str, digits: int, *, factor: float = 1) -> str:
    values = [float(row[field]) for row in found]  # type: ignore[arg-type]
    return f"{factor * mean(values):,.{digits}f}" if values else "–"


def _summary(rows: list[Row], policies: list[str], fractions: list[float]) -> list[str]:
    """One line a policy: accuracy at each fraction, and memory and speed at the middle one."""
    middle = fractions[len(fractions) // 2]
    head = [f"accuracy at {f:g}" for f in fractions]
    tail = [f"blocks freed at {middle:g}", "KV held", "tokens/s"]
    lines = [f"| policy | {' | '.join(head + tail)} |", "|---" * (len(head + tail) + 1) + "|"]
    for policy in policies:
        at = _rows_of(rows, policy, middle)
        share = [float(r["kv_bytes"]) / float(r["kv_bytes_full"]) for r in at]  # type: ignore[arg-type]
        line = [_average(_rows_of(rows, policy, f), "accuracy", 3) for f in fractions]
        line += [f"{sum(int(r['blocks_freed']) for r in at):,}"]  # type: ignore[call-overload]
        line += [f"{mean(share):.0%}" if share else "–", _average(at, "tokens_per_s", 0)]
        lines.append(f"| `{policy}` | {' | '.join(line)} |")
    return lines


def _per_task(rows: list[Row], policies: list[str], fraction: float) -> list[str]:
    """Accuracy with its interval, a column for each task."""
    tasks = list(dict.fromkeys(str(row["task"]) for row in rows if row["accuracy"] is not None))
    lines = [f"| policy at {fraction:g} | {' | '.join(tasks)} |", "|---" * (len(tasks) + 1) + "|"]
    for policy in policies:
        line = []
        for task in tasks:
            found = _rows_of(rows, policy, fraction, task)
            low, high = found[0]["ci95"] if found else (0, 0)  # type: ignore[misc]
            line.append(f"{found[0]['accuracy']:.3f} ({low:.2f}–{high:.2f})" if found else "–")
        lines.append(f"| `{policy}` | {' | '.join(line)} |")
    return lines


def policy_tables(reports: list[Path]) -> list[list[str]]:
    """The summary, then the tables of each fraction, from the largest."""
    rows = [row for report in reports for row in json.loads(report.read_text())["rows"]]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    fractions = sorted({row["fraction"] for row in rows if row["fraction"] < 1}, reverse=True)
    return [_summary(rows, policies, fractions), *(_per_task(rows, policies, f) for f in fractions)]


WRITTEN: dict[str, tuple[Path, Callable[[], str]]] = {
    "compatibility": (COMPATIBILITY, compatibility_page),
    "planning": (PLANNING, planning_page),
    "defaults": (DEFAULTS_FILE, defaults_file),
    "examples": (EXAMPLES, lambda: json.dumps(page_examples(), indent=1) + "\n"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in WRITTEN:
        commands.add_parser(name)
    reports = commands.add_parser("policies").add_argument
    reports("reports", type=Path, nargs="+", help="report.json of `kvreclaim eval`; one for each task")
    given = parser.parse_args()
    if given.command == "policies":
        for table in policy_tables(given.reports):
            print("\n".join(table), end="\n\n")
        return
    path, make = WRITTEN[given.command]
    path.write_text(make(), encoding="utf-8")
    print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
