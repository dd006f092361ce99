"""The drafter that an engine's config asks for."""

from __future__ import annotations

from kvreclaim import speculation
from kvreclaim.config import EngineConfig
from kvreclaim.engine.speculate.drafter import Drafter, NgramDrafter
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.formats import KVFormat


def make_drafter(config: EngineConfig, memory: MemoryManager, form: KVFormat) -> Drafter | None:
    """None where nothing is guessed."""
    said = speculation.from_json(config.speculative_config)
    if said is None:
        return None
    least, most = said.prompt_lookup_min, said.prompt_lookup_max
    return NgramDrafter(said.num_speculative_tokens, memory, form, least=least, most=most)
