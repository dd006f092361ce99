"""Configurations that compression inside vLLM refuses, checked in the front end."""

from __future__ import annotations

from typing import Any

from kvreclaim.compression.policy import CompressionPolicy, Signal
from kvreclaim.integrations.vllm.refusals import predicates as find
from kvreclaim.integrations.vllm.refusals.row import OTHER_MODEL, model_rows, refuse, rows
from kvreclaim.integrations.vllm.settings.groups import layer_kinds
from kvreclaim.integrations.vllm.settings.layer_needs import WATCHED
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.settings.speculation import BY_TOKENS, WITH_LAYERS

UNTESTED = "it is not tested"
WINDOW = "the window is counted in cache slots, which compression changes"
DISTANCES = "it takes distances from the place in the cache, which compression changes"
_DRAFTER = (
    "its drafter counts cache slots by positions, which compression changes, or it is not tested; use "
    f"{' or '.join(BY_TOKENS + WITH_LAYERS)}"
)
_SPLIT = "a compressed request's tokens are no longer where their positions say, which the split goes by"
_DTYPES = f"use one of {', '.join(find.CACHE_DTYPES)}"
_CONNECTORS = f"use {', '.join(find.CONNECTORS)} or a MultiConnector of these"
_WHOLE_PROMPTS = (
    *("NixlConnector", "NixlPullConnector", "NixlPushConnector"),
    *("MooncakeConnector", "MoRIIOConnector"),
)
_POLICY = "take a policy without these, such as surrogate or knorm"


def _same_files(config: Any) -> str | None:
    found, size = find.connector("ExampleConnector")(config), config.parallel_config.tensor_parallel_size
    return f"{found} and --tensor-parallel-size {size}" if found and size > 1 else None


def _hybrid(config: Any) -> str | None:
    unnamed = config.model_config.is_hybrid and layer_kinds(config.model_config) is None
    return "a hybrid model whose configuration names no layer_types" if unnamed else None


def _dual_chunk(config: Any) -> str | None:
    found = hasattr(config.model_config.hf_config, "dual_chunk_attention_config")
    return "dual-chunk attention" if found else None


CONFIG = (
    *rows(
        {
            find.other_drafter(BY_TOKENS + WITH_LAYERS): _DRAFTER,
            **{
                find.optional(f"speculative_config.{name}", f"{name} in --speculative-config"): UNTESTED
                for name in ("parallel_drafting", "use_heterogeneous_vocab", "disable_padded_drafter_batch")
            },
            find.both(
                find.SPECULATION, find.V2_RUNNER, "--speculative-config in the V2 model runner"
            ): "it has drafters of its own, which are not tested; use VLLM_USE_V2_MODEL_RUNNER=0, or remove "
            "--speculative-config",
            find.PIPELINE: "several batches are in flight on different stages, which is not tested; use "
            "--tensor-parallel-size",
            find.DECODE_CONTEXT: f"{_SPLIT}; set it to 1",
            find.PREFILL_CONTEXT: f"{_SPLIT}; set it to 1",
            find.present(
                "parallel_config.use_ubatching", "dual-batch overlap (--enable-dbo, --ubatch-size)"
            ): "half-batches take their lengths past us",
            find.ELASTIC: "workers come and go without the state of compressed requests",
            find.both(
                find.SPECULATION,
                find.ANY_CONNECTOR,
                "--speculative-config beside a KV connector (--kv-offloading-size, --kv-transfer-config)",
            ): "drafts of a request that is hidden from the connector are not tested; remove one of them",
            find.connector(*_WHOLE_PROMPTS): "it hands over whole prompts once they are computed, and a pass "
            f"may have taken tokens from them; {_CONNECTORS}",
            find.connector("LMCacheConnectorV1"): "it takes hits whole and resumes requests with a hit only, "
            f"and it is not tested; {_CONNECTORS}",
            find.other_connector: f"{UNTESTED}; {_CONNECTORS}",
            _same_files: "all ranks write the same files; remove one of them",
            find.present("ec_transfer_config", "an encoder-cache connector (--ec-transfer-config)"): UNTESTED,
            find.present(
                "aux_output_config.enabled", "returned routed experts (--enable-return-routed-experts)"
            ): "they are stored by prefix, and depend on what a compressed request can still see",
            find.present(
                "attention_config.hisparse_config", "HiSparse (--attention-config)"
            ): "it keeps the cache in host memory, out of our reach",
            find.MONOKERNELS: "they attend within one kernel for a whole layer, past the layers that we know",
            find.present(
                "cache_config.kv_sharing_fast_prefill", "--kv-sharing-fast-prefill"
            ): "layers that share a cache would be compressed twice",
            find.cache_dtype("nvfp4", "nvfp4_4over6"): "a block keeps the scales of all its tokens together, "
            f"in an order that the GPU's kernel chooses; {_DTYPES}",
            find.cache_dtype("fp8_ds_mla", "nvfp4_ds_mla"): "a slot holds the latent of MLA instead of keys "
            f"and values per head; {_DTYPES}",
            find.other_cache_dtype(*find.CACHE_DTYPES): f"{UNTESTED}; {_DTYPES}",
        }
    ),
    *model_rows(
        {
            find.not_one_of(
                "model_config.runner_type", ("generate",), "the runner type '{}'"
            ): "only generation keeps a cache that grows; use --runner generate",
            find.ENCODER_DECODER: "cross attention has a cache of another kind; take a decoder-only model",
            find.NO_ATTENTION: "its state does not grow, there is nothing to compress",
            _hybrid: "how many layers have attention, and how many a recurrent state, is known from these",
            find.LATENTS: "its cache holds one latent per token instead of keys and values per head",
            find.present(
                "model_config.is_diffusion", "a diffusion language model"
            ): "it rewrites tokens that it has generated",
            find.present(
                "model_config.is_mm_prefix_lm", "attention in both directions over multimodal prefixes"
            ): "the range is given by positions in the cache",
            find.present(
                "model_config.rswa_window", "a model with sliding-window layers that keep their start (R-SWA)"
            ): WINDOW,
            find.present("model_config.uses_alibi", "ALiBi"): DISTANCES,
            _dual_chunk: DISTANCES,
            find.present(
                "cache_config.sliding_window", "sliding-window layers (all, with a window of {} tokens)"
            ): f"{WINDOW}; {OTHER_MODEL} (or try --disable-sliding-window, which also shortens the context)",
        }
    ),
)
SEVERAL_KINDS = rows({find.SPECULATION: UNTESTED, find.ANY_CONNECTOR: UNTESTED})
RECURRENT = rows({find.V2_RUNNER: f"{UNTESTED}; set VLLM_USE_V2_MODEL_RUNNER=0"})
SIGNALS = rows(
    {
        find.V2_RUNNER: f"{UNTESTED}; set VLLM_USE_V2_MODEL_RUNNER=0, or {_POLICY}",
        find.absent("model_config.enforce_eager", "torch.compile and CUDA graphs"): "hooks on the layers do "
        f"not run in them; add --enforce-eager, or {_POLICY}",
        find.SPECULATION: "queries of drafts that are not accepted would be kept, too",
        find.other_layers: f"{UNTESTED}; {_POLICY}",
        find.ANY_CONNECTOR: "tokens that are loaded show no layer anything",
        find.other_cache_dtype(*find.PLAIN_DTYPES): f"{UNTESTED}; use one of {', '.join(find.PLAIN_DTYPES)}, "
        f"or {_POLICY}",
    },
    f"remove it, or {_POLICY}",
)
SIGNALS_AND_SNAPSHOTS = rows(
    {lambda snapshots: '"snapshots"' if snapshots else None: UNTESTED}, f"remove it, or {_POLICY}"
)
SNAPSHOTS = rows(
    {
        find.absent("cache_config.enable_prefix_caching", "--no-enable-prefix-caching"): (
            "snapshots are found by the hashes of prefix caching"
        ),
        find.ANY_CONNECTOR: "what follows a snapshot would be stored as if it were exact",
        find.other_layers: 'a snapshot has no blocks of these layers; remove "snapshots"',
        find.optional("kv_events_config.enable_kv_cache_events", "--kv-events-config"): (
            "events would name blocks that no earlier event announced"
        ),
        find.SPECULATION: UNTESTED,
    },
    'remove it or "snapshots"',
)


def refuse_config(vllm_config: Any) -> None:
    """Check a configuration before its options are read.

    Raises: InvalidArgumentError, UnsupportedModelError with the first reason found.
    """
    refuse(CONFIG, vllm_config)
    words = find.other_layers(vllm_config)
    if words is not None:
        refuse(
            SEVERAL_KINDS + (RECURRENT if find.has_recurrent(vllm_config) else ()),
            vllm_config,
            f" for a model whose layers are of several kinds (full attention beside {words})",
        )


def refuse_signals(vllm_config: Any, policy: CompressionPolicy, *, snapshots: bool) -> None:
    """Check a policy that needs the inputs of layers. Raises: InvalidArgumentError."""
    needs = policy.needs & WATCHED
    if needs:
        what = "hidden states" if Signal.TOKEN_SCORES in needs else "recent queries"
        where = f" beside a policy that looks at {what}"
        refuse(SIGNALS, vllm_config, where)
        refuse(SIGNALS_AND_SNAPSHOTS, snapshots, where)


def refuse_snapshots(vllm_config: Any, options: Options) -> None:
    """Check a configuration with snapshots. Raises: InvalidArgumentError."""
    if options.snapshots:
        refuse(SNAPSHOTS, vllm_config, ' beside "snapshots"')
