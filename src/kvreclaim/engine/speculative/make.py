"""The drafter that an engine's config asks for."""

from __future__ import annotations

from kvreclaim import speculation
from kvreclaim.config import EngineConfig
from kvreclaim.engine.speculative.draft_model import DraftModelDrafter
from kvreclaim.engine.speculative.drafter import Drafter, NgramDrafter
from kvreclaim.engine.speculative.load import DraftModel
from kvreclaim.model.loader import LoadedModel


def make_drafter(config: EngineConfig, target: LoadedModel, draft: DraftModel | None) -> Drafter | None:
    """None where nothing is guessed. draft: what load_draft has found for this config"""
    said = speculation.from_json(config.speculative_config)
    if said is None:
        return None
    if said.model is not None:
        assert draft is not None, "load_draft loads it"
        return DraftModelDrafter(said.num_speculative_tokens, target=target, draft=draft)
    least, most = said.prompt_lookup_min, said.prompt_lookup_max
    return NgramDrafter(said.num_speculative_tokens, least=least, most=most)
