"""The draft model of an engine: loaded next to the target, with the same tokenizer, and its cache's size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvreclaim import speculation
from kvreclaim.checks import require
from kvreclaim.config import EngineConfig
from kvreclaim.engine.request.sizing import choose_limits, memory_fraction, state_slots_of
from kvreclaim.model.loader import DTYPES, LoadedModel, load_model
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import kv_format
from kvreclaim.ops.formats.format import plain_format


@dataclass(frozen=True, slots=True, eq=False)
class DraftModel:
    """A draft model. name: its name in speculative_config; config: the limits of its cache."""

    name: str
    loaded: LoadedModel
    config: EngineConfig

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of its blocks and of its recurrent layers' states."""
        assert self.config.num_blocks is not None, "chosen"
        facts = self.loaded.facts
        states = state_slots_of(self.config, facts).num_slots * facts.state_bytes if facts.states else 0
        return self.config.num_blocks * _block_bytes(facts, self.config) + states


def load_draft(
    config: EngineConfig, target: LoadedModel, known: DraftModel | None = None
) -> DraftModel | None:
    """Load the draft model that a config names, on the target's device and in its dtype. Its limits are
    chosen from the free memory. Returns None if the config names none.

    known: a loaded draft model; its weights are shared if the config names the same one

    Raises: InvalidArgumentError for another tokenizer, or layers that attend within chunks; as load_model.
    """
    settings = speculation.from_json(config.speculative_config)
    if settings is None or settings.model is None:
        return None
    if known is not None and known.name == settings.model:
        loaded = known.loaded
    else:
        facts = target.facts
        dtype = next(name for name, each in DTYPES.items() if each == facts.dtype)
        loaded = load_model(
            settings.model,
            dtype=dtype,
            device=str(facts.device),
            kernels=config.kernels,
            quantized_activations=config.quantized_activations,
            cache_packed_weights=config.cache_packed_weights,
        )
    check_same_tokens(target, loaded)
    require(
        all(layer.softmax.chunk is None for layer in loaded.facts.layers),
        f"layers of the draft model {loaded.name!r} attend within chunks, which its cache, one table for all "
        "layers, cannot hold; name another one.",
        speculation.WHERE,
    )
    return DraftModel(settings.model, loaded, draft_limits(config, settings, target.facts, loaded.facts))


def check_same_tokens(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise InvalidArgumentError unless the same ids are the same tokens. Ids of the embedding beyond the
    tokenizer are ignored. Models without tokenizers are compared by their vocabulary size."""
    problem = None
    if target.tokenizer is None and draft.tokenizer is None:
        if target.vocab_size != draft.vocab_size:
            problem = f"has {draft.vocab_size} ids, and {target.name!r} {target.vocab_size}"
    elif target.tokenizer is None or draft.tokenizer is None:
        has_none = target if target.tokenizer is None else draft
        problem = f"cannot be compared with {target.name!r}: {has_none.name!r} has no tokenizer"
    else:
        target_vocab, draft_vocab = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
        if target_vocab != draft_vocab:
            different = dict(sorted(target_vocab.items() ^ draft_vocab.items(), key=lambda item: item[1]))
            token = next(iter(different))
            problem = (
                f"has another tokenizer than {target.name!r}: {len(different)} tokens differ, such as "
                f"{token!r} (here {draft_vocab.get(token)}, there {target_vocab.get(token)})"
            )
    require(
        problem is None,
        f"the draft model {draft.name!r} {problem}; name one of the same family, with the same tokenizer.",
        speculation.WHERE,
    )


def draft_limits(
    config: EngineConfig, settings: speculation.SpeculativeConfig, target: ModelFacts, draft: ModelFacts
) -> EngineConfig:
    """Choose the limits of a draft model's cache. Its share of the memory for blocks is its share of the
    bytes per token. The cache holds the longest sequence, or as many tokens as fit. Recurrent layers keep a
    state after each draft, and none for prefix hits."""
    target_format = kv_format(config.kv_cache_dtype, target.dtype)
    target_bytes = target_format.bytes_per_block(target.layers, config.block_size)
    limits = EngineConfig(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(config.max_model_len or target.max_position, draft.max_position),
        enable_prefix_caching=config.enable_prefix_caching and not draft.states,
        state_drafts=settings.num_speculative_tokens if draft.states else 0,
        disable_hybrid_kv_cache_manager=True,
        max_signal_bytes=0,
        kernels=config.kernels,
        enforce_eager=config.enforce_eager,
    )
    draft_bytes = _block_bytes(draft, limits)
    fraction = max(memory_fraction(config, draft.device) * draft_bytes / (draft_bytes + target_bytes), 0.01)
    return choose_limits(replace(limits, kv_memory_fraction=fraction), draft)


def _block_bytes(facts: ModelFacts, config: EngineConfig) -> int:
    return plain_format(facts.dtype).bytes_per_block(facts.layers, config.block_size)
