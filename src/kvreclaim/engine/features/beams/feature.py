"""Searches for the likeliest outputs by beams."""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.beams import BeamSearchParams
from kvreclaim.checks import require
from kvreclaim.config import EngineConfig
from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.request.request import Beams
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.sampling.beam_search import BeamSearch
from kvreclaim.engine.step.engine import Engine
from kvreclaim.errors import RequestTooLongError
from kvreclaim.refusals import Feature
from kvreclaim.schedule.budget.footprint import Footprint, most_blocks


class BeamSearches(RequestFeature):
    """All beams of a request run at once."""

    option = BeamSearchParams
    is_made = True  # from the arguments of beam_search

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def conditions(self, spec: RequestSpec) -> Mapping[Feature, object]:
        return {Feature.BEAM_SEARCH: True}

    def limited(self, draft: RequestDraft, max_len: int) -> None:
        params, num_prompt = draft.spec.option(BeamSearchParams), len(draft.spec.prompt_token_ids)
        assert params is not None, "the feature is on"
        eos = frozenset() if params.ignore_eos else self._engine.loaded.eos_token_ids
        search = BeamSearch(params, max_len - num_prompt, eos)
        limits, vocab_size = self._engine.limits, self._engine.loaded.vocab_size
        check_beams(search, num_prompt, draft.footprint, limits, vocab_size)
        draft.state[Beams] = Beams(search)


def check_beams(
    search: BeamSearch, num_prompt: int, footprint: Footprint, config: EngineConfig, vocab_size: int
) -> None:
    """Raise InvalidArgumentError or RequestTooLongError for a beam search that can never run to its end: all
    its beams run at once."""
    width = search.params.beam_width
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        require(
            width <= getattr(config, name),
            f"beam_width is {width}, but {name} is {getattr(config, name)}, and all beams run at once; lower "
            f"beam_width or raise {name}.",
            "beam_width",
        )
    candidates = search.num_candidates(width, len(search.eos))
    require(
        candidates <= width * vocab_size,
        f"beam_width is {width}: its steps choose from {candidates} candidates, but the vocabulary has "
        f"{vocab_size} tokens a beam; use a model with more, or ignore_eos.",
        "beam_width",
    )
    assert config.num_blocks is not None, "the engine's limits are set"
    needed = most_blocks(width, num_prompt, num_prompt + search.max_tokens, footprint)
    if needed > config.num_blocks:
        raise RequestTooLongError(
            f"{width} beams of a prompt of {num_prompt} tokens and {search.max_tokens} more need {needed} "
            f"blocks, but the pool has {config.num_blocks}; lower beam_width or max_tokens, shorten the "
            f"prompt, or raise {'full_cache_host_size' if config.full_cache_host_size else 'num_blocks'}.",
            field="beam_width",
        )
