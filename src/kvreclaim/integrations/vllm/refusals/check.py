"""`python -m kvreclaim.integrations.vllm.refusals.check`: compare the installed vLLM with what we expect.

Parameters or names that differ are refused at start. A function with another source alone is not, and must be
read again before a new version of vLLM is declared supported.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvreclaim.integrations.vllm.refusals.expect import Function, Names, digest_of, find, parameters_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row for everything that is expected. Returns: 1 if anything but a source differs, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m kvreclaim.integrations.vllm.refusals.check", description=__doc__
    )
    parser.add_argument("--differences", action="store_true", help="only rows that differ")
    parser.add_argument("--table", action="store_true", help="a table for the installed vLLM, to port to it")
    options = parser.parse_args(arguments)
    import vllm

    # The CPU worker replaces parts of torch, and has to be the first worker module that is imported.
    import vllm.v1.worker.cpu_worker

    from kvreclaim.integrations.vllm.refusals import signatures
    from kvreclaim.integrations.vllm.settings import family

    bad = 0
    print(f"vLLM {vllm.__version__}; known: {family.supported()}")
    for section, rows in signatures.sections().items():
        print(f"\n[{section}]")
        for row in rows:
            state, text = _table_row(row) if options.table else _row(row)
            bad += state == "DIFFERS"
            if options.table or not options.differences or state != "ok":
                print(text)
    return int(bad > 0)


def _row(row: Function | Names) -> tuple[str, str]:
    try:
        found = find(row.where)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("vllm"):
            return "skipped", f"skipped        {row.where}: needs {error.name}, which is not installed"
        return "DIFFERS", f"DIFFERS        {row.where} is missing"
    except AttributeError:
        return "DIFFERS", f"DIFFERS        {row.where} is missing"
    difference = row.difference()
    if difference is not None:
        return "DIFFERS", f"DIFFERS        {difference}"
    if isinstance(row, Names):
        return "ok", f"ok             {row.where} has {row.names}"
    digest = digest_of(found)
    if digest != row.digest:
        return "body", f"source differs {row.where}({row.parameters}) #{digest}, expected #{row.digest}"
    return "ok", f"ok             {row.where}({row.parameters}) #{digest}"


def _table_row(row: Function | Names) -> tuple[str, str]:
    """Return the table row for the installed vLLM."""
    state, text = _row(row)
    if isinstance(row, Names) or state == "skipped" or text.endswith("is missing"):
        return state, f"# {text}" if state != "ok" else f"{row.where} has {getattr(row, 'names', '')}"
    found = find(row.where)
    parameters = row.parameters if row.difference() is None else parameters_of(found)
    return state, f"{row.where}({parameters}) #{digest_of(found)}"


if __name__ == "__main__":
    sys.exit(main())
