"""Make the drafter that an engine's config names."""

from __future__ import annotations

from kvreclaim import speculation
from kvreclaim.config import EngineConfig
from kvreclaim.engine.speculative.draft_model import DraftModelDrafter
from kvreclaim.engine.speculative.drafter import Drafter, NgramDrafter
from kvreclaim.engine.speculative.load import DraftModel
from kvreclaim.model.loader import LoadedModel


def make_drafter(config: EngineConfig, target: LoadedModel, draft: DraftModel | None) -> Drafter | None:
    """Return the drafter; None without speculation. draft: the result of load_draft for this config"""
    settings = speculation.from_json(config.speculative_config)
    if settings is None:
        return None
    if settings.model is not None:
        assert draft is not None, "load_draft loads it"
        return DraftModelDrafter(settings.num_speculative_tokens, target=target, draft=draft)
    least, most = settings.prompt_lookup_min, settings.prompt_lookup_max
    return NgramDrafter(settings.num_speculative_tokens, least=least, most=most)
