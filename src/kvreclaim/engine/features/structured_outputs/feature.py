"""Restricts outputs to a JSON schema, a regular expression, a choice of texts or a grammar."""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import TYPE_CHECKING

from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.step.engine import Engine
from kvreclaim.refusals import Feature, refuse
from kvreclaim.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from kvreclaim.engine.features.structured_outputs.grammar import Grammars, OutputGrammar


class StructuredOutputs(RequestFeature):
    """The request keeps the beginning of its grammar, which is forked for each output."""

    option = StructuredOutputsParams
    is_made = True  # a field of SamplingParams
    parameter = "structured_outputs"

    def __init__(self, engine: Engine) -> None:
        self._engine, self._lock = engine, Lock()
        self._grammars: Grammars | None = None

    @property
    def grammars(self) -> Grammars:
        """Grammars for the model's tokens. Raises: InvalidArgumentError for a tokenizer that cannot have
        any."""
        from kvreclaim.engine.features.structured_outputs.grammar import Grammars

        loaded = self._engine.loaded
        with self._lock:  # the first one reads the vocabulary
            if self._grammars is None:
                self._grammars = Grammars(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
            return self._grammars

    def prepare(self, spec: RequestSpec) -> None:
        """Make the request's grammar."""
        refuse({**self._engine.features, **self.conditions(spec)})
        self._begin(spec)

    def conditions(self, spec: RequestSpec) -> Mapping[Feature, object]:
        return {Feature.STRUCTURED_OUTPUTS: True}

    def limited(self, draft: RequestDraft, max_len: int) -> None:
        begun = draft.state[StructuredOutputsParams] = self._begin(draft.spec)
        self.grammars.check(begun, draft.spec.params, draft.bad_words)

    def rule(self, request: Request) -> OutputGrammar:
        begun: OutputGrammar = request.state[StructuredOutputsParams]
        return begun.fork()

    def _begin(self, spec: RequestSpec) -> OutputGrammar:
        params = spec.params.structured_outputs
        assert params is not None, "the feature is on"
        return self.grammars.begin(params)
