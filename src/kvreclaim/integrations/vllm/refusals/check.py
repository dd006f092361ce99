"""`python -m kvreclaim.integrations.vllm.refusals.check`: what changed in the names of vLLM that we use.

Prints one page about the installed vLLM: names that are gone, other parameters, other sources. The first two
are refused at start. A function with another source alone is not, and must be read again before a new version
of vLLM is declared supported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from kvreclaim.integrations.vllm.refusals import expect
from kvreclaim.integrations.vllm.refusals.expect import Function, Names
from kvreclaim.integrations.vllm.settings import family

GONE, OTHER, SOURCE, LEFT_OUT = "gone", "other parameters", "another source alone", "not looked at"
CHANGES = (GONE, OTHER, SOURCE)


@dataclass(frozen=True, slots=True)
class Change:
    """A row that is not as expected.

    kind: one of GONE, OTHER, SOURCE, LEFT_OUT
    text: for the page
    row:  for the table of changes of a new version
    """

    section: str
    kind: str
    text: str
    row: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the page. Returns: 1 if a name is gone or has other parameters, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m kvreclaim.integrations.vllm.refusals.check", description=__doc__
    )
    parser.add_argument(
        "--against",
        choices=family.FAMILIES,
        help="the version to compare with; the installed one if it is known, else the newest",
    )
    parser.add_argument("--table", action="store_true", help="print the rows for a new changes.txt instead")
    options = parser.parse_args(arguments)
    import vllm

    # The CPU worker replaces parts of torch, and has to be the first worker module that is imported.
    import vllm.v1.worker.cpu_worker

    own = family.minor(vllm.__version__)
    against = options.against or (own if own in family.FAMILIES else family.NEWEST)
    table = expect.read_table(*family.FAMILIES[against].expected())
    changes = [change for section, rows in table.items() for change in _changes(section, rows)]
    if options.table:
        print("\n".join(_table(changes)))
    else:
        count = sum(map(len, table.values()))
        print(f"vLLM {vllm.__version__} and what kvreclaim {version('kvreclaim')} uses of vLLM {against}")
        print("\n".join(_page(changes, count)))
    return int(any(change.kind in (GONE, OTHER) for change in changes))


def _changes(section: str, rows: Sequence[Function | Names]) -> Iterator[Change]:
    for row in rows:
        try:
            found = expect.find(row.where)
        except (ModuleNotFoundError, AttributeError) as error:
            needed = getattr(error, "name", None) or "vllm"
            if isinstance(error, ModuleNotFoundError) and not needed.startswith("vllm"):
                text = f"{row.where} needs {needed}, which is not installed"
                yield Change(section, LEFT_OUT, text, f"# {text}")
            else:
                yield Change(section, GONE, row.where, f"- {row.where}")
            continue
        difference = row.difference()
        if isinstance(row, Names):
            if difference is not None:
                yield Change(section, GONE, difference, f"# {difference}")
        else:
            digest = expect.digest_of(found)
            parameters = row.parameters if difference is None else expect.parameters_of(found)
            line = f"{row.where}({parameters}) #{digest}"
            if difference is not None:
                yield Change(section, OTHER, difference, line)
            elif digest != row.digest:
                yield Change(section, SOURCE, row.where, line)


def _page(changes: Sequence[Change], count: int) -> Iterator[str]:
    """Lines of the page: each name once under its kind, with the parts of the plugin that use it."""
    for kind in (*CHANGES, LEFT_OUT):
        places: dict[str, list[str]] = {}
        for change in changes:
            if change.kind == kind:
                places.setdefault(change.text, []).append(change.section)
        if places or kind in CHANGES:
            yield f"\n{kind}: {len(places)} of {count}"
        yield from (f"  {text}  [{', '.join(sections)}]" for text, sections in places.items())


def _table(changes: Sequence[Change]) -> Iterator[str]:
    section = None
    for change in changes:
        if change.section != section:
            section = change.section
            yield f"\n[{section}]"
        yield change.row


if __name__ == "__main__":
    sys.exit(main())
