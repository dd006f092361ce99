"""The draft model of an engine: loaded beside the target, with the same tokenizer, and its cache's size."""

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
    """A draft model. name: as speculative_config calls it; config: the limits of its cache."""

    name: str
    loaded: LoadedModel
    config: EngineConfig

    @property
    def kv_bytes(self) -> int:
        """Bytes of its blocks, and of its recurrent layers' states."""
        assert self.config.num_blocks is not None, "chosen"
        facts = self.loaded.facts
        states = state_slots_of(self.config, facts).num_slots * facts.state_bytes if facts.states else 0
        return self.config.num_blocks * _block_bytes(facts, self.config) + states


def load_draft(
    config: EngineConfig, target: LoadedModel, known: DraftModel | None = None
) -> DraftModel | None:
    """The draft model that a config asks for, on the target's device and in its dtype, with limits chosen
    from the memory that is free; None where it asks for none.

    known: one that is there already, whose weights are shared if it is the same

    Raises: InvalidArgumentError for one with another tokenizer, or whose layers attend within chunks; as
        load_model.
    """
    said = speculation.from_json(config.speculative_config)
    if said is None or said.model is None:
        return None
    if known is not None and known.name == said.model:
        loaded = known.loaded
    else:
        facts = target.facts
        dtype = next(name for name, each in DTYPES.items() if each == facts.dtype)
        loaded = load_model(
            said.model,
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
    return DraftModel(said.model, loaded, draft_limits(config, said, target.facts, loaded.facts))


def check_same_tokens(target: LoadedModel, draft: LoadedModel) -> None:
    """Raise InvalidArgumentError unless the same ids are the same tokens. How many ids a model's embedding
    has beyond its tokenizer makes no difference; of models without tokenizers nothing else is known."""
    problem = None
    if target.tokenizer is None and draft.tokenizer is None:
        if target.vocab_size != draft.vocab_size:
            problem = f"has {draft.vocab_size} ids, and {target.name!r} {target.vocab_size}"
    elif target.tokenizer is None or draft.tokenizer is None:
        has_none = target if target.tokenizer is None else draft
        problem = f"cannot be compared with {target.name!r}: {has_none.name!r} has no tokenizer"
    else:
        ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
        if ours != theirs:
            different = dict(sorted(ours.items() ^ theirs.items(), key=lambda item: item[1]))
            token = next(iter(different))
            problem = (
                f"has another tokenizer than {target.name!r}: {len(different)} tokens differ, such as "
                f"{token!r} (here {theirs.get(token)}, there {ours.get(token)})"
            )
    require(
        problem is None,
        f"the draft model {draft.name!r} {problem}; name one of the same family, with the same tokenizer.",
        speculation.WHERE,
    )


def draft_limits(
    config: EngineConfig, said: speculation.SpeculativeConfig, target: ModelFacts, draft: ModelFacts
) -> EngineConfig:
    """Limits of a draft model's cache: every token that a sequence may have finds room, or as many as its
    part of the memory for blocks holds, which is what its tokens take beside the target's. Recurrent layers
    have a state behind each draft, and none that a prefix hit could begin with."""
    form = kv_format(config.kv_cache_dtype, target.dtype)
    theirs = form.bytes_per_block(target.layers, config.block_size)
    limits = EngineConfig(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(config.max_model_len or target.max_position, draft.max_position),
        enable_prefix_caching=config.enable_prefix_caching and not draft.states,
        state_drafts=said.num_speculative_tokens if draft.states else 0,
        disable_hybrid_kv_cache_manager=True,
        max_signal_bytes=0,
        kernels=config.kernels,
        enforce_eager=config.enforce_eager,
    )
    ours = _block_bytes(draft, limits)
    fraction = max(memory_fraction(config, draft.device) * ours / (ours + theirs), 0.01)
    return choose_limits(replace(limits, kv_memory_fraction=fraction), draft)


def _block_bytes(facts: ModelFacts, config: EngineConfig) -> int:
    return plain_format(facts.dtype).bytes_per_block(facts.layers, config.block_size)
