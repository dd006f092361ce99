"""`kvreclaim policies` and `kvreclaim tasks`: what --kv-compression and `kvreclaim eval --tasks` accept."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from kvreclaim.cli.config_options import with_config
from kvreclaim.eval.task_names import TASK_KINDS


@with_config
def policies() -> None:
    """List the compression policies: name, whether they need calibration, whether heads keep equally many
    tokens, and what they keep."""
    from kvreclaim.compression.policy import Wrapper
    from kvreclaim.compression.refusals import STATISTICS
    from kvreclaim.compression.registry import make_policy, policy_class, policy_names

    rows = []
    for name in policy_names():
        policy = make_policy(name)
        needs = "yes" if policy.needs & STATISTICS else "no"
        heads = "unequal" if policy.eviction_method.uneven else "equal"
        inner = f" (by default of {policy.default_inner})" if isinstance(policy, Wrapper) else ""
        rows.append((name, needs, heads, first_sentence(policy_class(name)) + inner))
    print_rows(("policy", "calibration", "heads", "keeps"), rows)


@with_config
def tasks() -> None:
    """List the tasks of `kvreclaim eval`: name and what they measure."""
    rows = [(", ".join(kind.forms(name)), kind.measures) for name, kind in TASK_KINDS.items()]
    print_rows(("task", "measures"), rows)


def first_sentence(documented: type) -> str:
    """The first sentence of a class's docstring, without the formula that may follow."""
    text = " ".join((inspect.getdoc(documented) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[a-z)\]]\.) ", text, maxsplit=1)[0].rstrip(".:")


def print_rows(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """A table on standard output; into a pipe, one line for each row."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, padding=(0, 2, 0, 0), header_style="bold")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(table)
