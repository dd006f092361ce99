"""Grammars of structured outputs, before a request is queued."""

from __future__ import annotations

from kvreclaim.structured_outputs import StructuredOutputsParams


def check_grammar(params: StructuredOutputsParams) -> None:
    """Raises: InvalidArgumentError for a schema, an expression or a grammar that nothing can follow."""
    from kvreclaim.engine.sampling.grammar import check

    check(params)
