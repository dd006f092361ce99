"""Predicates of the plugin's refusals: what they find in a VllmConfig, a spec of a group or a layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

from kvreclaim.integrations.vllm.settings.groups import layer_kinds

Predicate = Callable[[Any], str | None]
"""Returns what is refused of an object, in words, or None."""

SLOT_DTYPES = (
    *("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
)
"""A slot has a token's key and value with their own scales."""
PLAIN_DTYPES = ("auto", "float16", "bfloat16")
FP8_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")
CACHE_DTYPES = PLAIN_DTYPES + FP8_DTYPES + SLOT_DTYPES
CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "ExampleConnector")
"""KV connectors that work with compression, alone and within a MultiConnector."""


def present(path: str, words: str) -> Predicate:
    """Find an attribute that is set. {} in the words stands for its value."""
    get = attrgetter(path)
    return lambda subject: words.format(get(subject)) if _is_set(get(subject)) else None


def optional(path: str, words: str) -> Predicate:
    """Find an attribute that is set, and that not every version, or not every layer, has."""

    def find(subject: Any) -> str | None:
        for name in path.split("."):
            subject = getattr(subject, name, None)
        return words if _is_set(subject) else None

    return find


def _is_set(value: object) -> bool:
    return not (value is None or (isinstance(value, int) and value == 0))


def absent(path: str, words: str) -> Predicate:
    """Find an attribute that is False."""
    get = attrgetter(path)
    return lambda subject: None if get(subject) else words


def above_one(path: str, option: str) -> Predicate:
    """Find an option that is greater than 1."""
    get = attrgetter(path)
    return lambda config: f"{option} = {get(config)}" if get(config) > 1 else None


def one_of(path: str, values: Collection[object], words: str) -> Predicate:
    """Find an attribute with one of these values. {} in the words stands for it."""
    get = attrgetter(path)
    return lambda subject: words.format(get(subject)) if get(subject) in values else None


def not_one_of(path: str, values: Collection[object], words: str) -> Predicate:
    """Find an attribute with another value than these. {} in the words stands for it."""
    get = attrgetter(path)
    return lambda subject: None if get(subject) in values else words.format(get(subject))


def both(first: Predicate, second: Predicate, words: str) -> Predicate:
    """Find two things together."""
    return lambda config: words if first(config) and second(config) else None


def other_drafter(known: Collection[str]) -> Predicate:
    """Find a method of speculative decoding that is not among these."""

    def find(config: Any) -> str | None:
        speculative = config.speculative_config
        if speculative is None or speculative.method in known:
            return None
        return f"method {speculative.method!r} of --speculative-config"

    return find


def cache_dtype(*those: str) -> Predicate:
    """Find one of these --kv-cache-dtypes."""
    return one_of("cache_config.cache_dtype", those, "--kv-cache-dtype {}")


def other_cache_dtype(*those: str) -> Predicate:
    """Find a --kv-cache-dtype that is none of these."""
    return not_one_of("cache_config.cache_dtype", those, "--kv-cache-dtype {}")


def other_layers(config: Any) -> str | None:
    """Find layers without full attention in a model that has layers with it."""
    kinds = layer_kinds(config.model_config)
    return None if kinds is None else kinds.words


def has_recurrent(config: Any) -> bool:
    """Return whether the model has both recurrent layers and layers with full attention."""
    kinds = layer_kinds(config.model_config)
    return kinds is not None and kinds.window is None


def connectors(config: Any) -> list[tuple[str, str | None]]:
    """Name and module of each KV connector of a configuration."""
    transfer = config.kv_transfer_config
    return [] if transfer is None else list(_named(vars(transfer)))


def _named(transfer: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    name, place = transfer["kv_connector"], transfer.get("kv_connector_module_path")
    if name != "MultiConnector" or place:
        yield name, place
        return
    for each in transfer["kv_connector_extra_config"].get("connectors", ()):
        yield from _named(each)


def connector(*names: str) -> Predicate:
    """Find one of vLLM's own KV connectors of these names."""

    def find(config: Any) -> str | None:
        found = [name for name, place in connectors(config) if name in names and not place]
        return f"the KV connector {found[0]}" if found else None

    return find


def other_connector(config: Any) -> str | None:
    """Find a KV connector that is not tested."""
    for name, place in connectors(config):
        if place or name not in CONNECTORS:
            return f"the KV connector {name} of {place or 'vLLM'}"
    return None


SPECULATION = present("speculative_config", "--speculative-config")
V2_RUNNER = present("use_v2_model_runner", "the V2 model runner")
ANY_CONNECTOR = present("kv_transfer_config", "a KV connector, such as --kv-offloading-size")
PIPELINE = above_one("parallel_config.pipeline_parallel_size", "--pipeline-parallel-size")
DECODE_CONTEXT = above_one("parallel_config.decode_context_parallel_size", "--decode-context-parallel-size")
PREFILL_CONTEXT = above_one(
    "parallel_config.prefill_context_parallel_size", "--prefill-context-parallel-size"
)
ELASTIC = present("parallel_config.enable_elastic_ep", "elastic expert parallelism (--enable-elastic-ep)")
MONOKERNELS = optional("kernel_config.monokernel", "MonoKernels (--monokernel)")
ENCODER_DECODER = present("model_config.is_encoder_decoder", "an encoder-decoder model")
NO_ATTENTION = present("model_config.is_attention_free", "a model without attention (Mamba)")
LATENTS = present("model_config.use_mla", "multi-head latent attention (MLA)")
ATTENTION_TYPE = not_one_of("attn_type", ("decoder",), "attention of type '{!s}'")
SHARED_CACHE = present("kv_sharing_target_layer_name", "a cache shared with another layer")
FUSED_WRITE = optional("kv_cache_update_bypass", "a fused write to the cache")
