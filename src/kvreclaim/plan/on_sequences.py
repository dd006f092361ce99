"""A model's cache, one sequence, and many over one prefix: the parts of a plan that need no card."""

from __future__ import annotations

from kvreclaim.kv_bytes import KVBytes
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.plan import words
from kvreclaim.plan.demand import Cache, shared_load
from kvreclaim.plan.plan_request import PlanRequest
from kvreclaim.plan.sections import PlanReport, Section
from kvreclaim.plan.shapes import STATE_BITS, LayerShape, ModelShape
from kvreclaim.plan.weights import PLAIN_BITS, dtype_of, weight_bytes, weight_format

RUNNING_SLOTS = 2
"""States of a running sequence."""
RESERVED = 4096
"""Tokens that a server without paging is taken to reserve for each sequence."""


def on_model(answer: PlanReport, cache: Cache, request: PlanRequest) -> None:
    shape = cache.shape
    section = answer.section(shape.name)
    section.row("layers", ", ".join(f"{count} x {_layer(kind)}" for kind, count in shape.kinds()))
    read = f", {words.billions(shape.active_params)} read for a token" if shape.has_experts else ""
    section.row("parameters", f"{words.billions(shape.num_params)}{read}")
    section.row(
        "a token",
        f"{words.size(cache.token_bytes)} of {cache.form.name}, {words.size(cache.block_bytes)} a block of "
        f"{cache.block_size}",
    )
    if shape.has_states:
        section.row("a sequence", f"{words.size(cache.state_bytes)} of states, whatever its length")
    weights = weight_format(request.weights, shape)
    section.row("weights", f"{words.size(weight_bytes(shape, weights).total)} in {weights.name}")
    for note in shape.notes:
        section.row("note", note)
    attending = [(kind, count) for kind, count in shape.kinds() if kind.attends]
    for kind, count in attending:
        section.step(_unit(kind, count, cache.form, cache.block_size))
    for kind, count in shape.kinds():
        if kind.is_recurrent:
            section.step(_state(kind, count, PLAIN_BITS[dtype_of(shape)]))
    if len(attending) > 1:
        section.step(f"together {cache.block_bytes:,} bytes a block")
    expanded = cache.expanded_token_bytes()
    if expanded is not None:
        section.step(
            f"keys and values of all heads in 16 bits would be {expanded:,} bytes a token, "
            f"{expanded / cache.token_bytes:.1f} times as many"
        )
    answer.set(
        model=shape.name,
        parameters=shape.num_params,
        weights=weights.name,
        weight_bytes=weight_bytes(shape, weights).total,
        active_parameters=shape.active_params,
        layers=shape.num_layers,
        position_limit=shape.max_position,
        kv_cache_dtype=cache.form.name,
        block_size=cache.block_size,
        block_bytes=cache.block_bytes,
        kv_bytes_per_token=_whole(cache.token_bytes),
        kv_bytes_per_token_expanded=expanded,
        state_bytes_per_sequence=cache.state_bytes or None,
        compression=request.compression,
        notes=list(shape.notes),
    )


def _whole(number: float) -> float | int:
    return int(number) if number == int(number) else number


def _layer(kind: LayerShape) -> str:
    if not kind.attends:
        return "(recurrent)" if kind.is_recurrent else "(no attention, no state)"
    state = " beside a recurrent part" if kind.is_recurrent else ""
    window = f", {kind.held}" if kind.held else ""
    if kind.latent:
        return f"(a latent of {kind.v_head_dim} + {kind.key_dims} for {kind.num_heads} heads{window})"
    return f"({kind.num_heads} heads, {kind.num_kv_heads} KV heads of {kind.head_dim}{window}{state})"


def _state(kind: LayerShape, count: int, bits: int) -> str:
    each = kind.state_bytes(bits)
    return (
        f"{count} layers x ({kind.conv:,} inputs of convolutions x {bits} bits + {kind.summed:,} sums x "
        f"{STATE_BITS} bits = {each:,} bytes) = {count * each:,} bytes a sequence"
    )


def _unit(kind: LayerShape, count: int, form: KVBytes, size: int) -> str:
    heads, keys, values = kind.num_kv_heads, kind.key_dims, kind.v_head_dim
    unit = form.unit_bytes(keys, values, size)
    params = size * form.slot_params(keys, values)
    scales = f" + {params} of scales" if params else ""
    bits = form.keys.bits, form.values.bits
    numbers = f"({keys} + {values}) x {bits[0]} bits"
    if bits[0] != bits[1]:
        numbers = f"({keys} x {bits[0]} bits + {values} x {bits[1]} bits)"
    return (
        f"{count} layers x {words.count(heads, 'KV head')} x ({size} x {numbers}"
        f"{scales} = {unit:,} bytes) = {count * heads * unit:,} bytes a block"
    )


def on_request(answer: PlanReport, cache: Cache, request: PlanRequest, context: int) -> None:
    size, held = cache.block_size, cache.held(context)
    blocks, prompt = cache.blocks(context), cache.prompt_blocks(context)
    slots = blocks * size
    reserved = _reserved(cache.shape, request, context)
    section = answer.section(f"one sequence of {context:,} tokens")
    section.row("holds", f"{words.count(blocks, 'block')}, {words.size(blocks * cache.block_bytes)}")
    section.row("used", f"{words.per_cent(held / slots)} of {slots:,} slots")
    section.row(
        "reserved ahead",
        f"{words.size(reserved * cache.token_bytes)} at {reserved:,} tokens, "
        f"{words.per_cent(held / reserved)} used",
    )
    section.step(f"{held:,} tokens / {size} = {held / size:g}, in whole blocks {blocks:,}: {slots:,} slots")
    section.step(f"{held:,} / {slots:,} = {words.per_cent(held / slots)} used, {slots - held} slots empty")
    section.step(f"{blocks:,} x {cache.block_bytes:,} = {blocks * cache.block_bytes:,} bytes")
    if reserved != slots:
        section.step(f"reserved for {reserved:,} tokens: {reserved / slots:.3g} times as much")
    if cache.footprint.eviction_method.evicts:
        _budget(section, cache, context)
    share = None
    if states := RUNNING_SLOTS * cache.state_bytes:
        whole = blocks_for(context, size) * cache.block_bytes
        share = whole / (whole + states)
        section.row("states", f"{words.size(states)}, in two slots: a step reads one and writes the other")
        section.row("can be compressed", f"{words.per_cent(share)} of its bytes without a budget")
        section.step(f"{whole:,} / ({whole:,} + {RUNNING_SLOTS} x {cache.state_bytes:,})")
    windowed = None
    if cache.shape.has_windows:
        windowed = cache.shape.windowed_bytes(cache.form, context, size, request.max_num_batched_tokens)
        section.row(
            "with windows given back",
            f"{words.size(windowed)}, a chunk's included; all else here is of one table for all layers",
        )
    answer.set(
        context=context,
        blocks=blocks,
        blocks_in_prompt=prompt,
        utilisation=held / slots,
        kv_bytes=blocks * cache.block_bytes,
        kv_bytes_in_prompt=prompt * cache.block_bytes,
        kv_bytes_windows_given_back=windowed,
        state_bytes=states or None,
        compressible_share=share,
        contiguous_tokens=reserved,
        contiguous_kv_bytes=_whole(reserved * cache.token_bytes),
        contiguous_utilisation=held / reserved,
    )


def _budget(section: Section, cache: Cache, context: int) -> None:
    step, size = cache.footprint, cache.block_size
    peak, peak_slots = cache.prompt_blocks(context), step.slots_needed(context, context)
    section.row(
        "in a prompt", f"{words.count(peak, 'block')} at most, {words.size(peak * cache.block_bytes)}"
    )
    if step.bounded:
        low = -(-step.budget // size)
        section.step(
            f"decoding it goes from {step.budget:,} to {step.decode_cap:,} tokens and back: "
            f"{low:,} to {-(-step.decode_cap // size):,} blocks"
        )
        section.step(
            f"a prompt is cut between chunks at {step.budget:,} + max({step.interval}, {step.max_chunk:,}) = "
            f"{step.prompt_cap:,} tokens"
        )
    section.step(f"in a prompt of {context:,} at most {peak_slots:,} tokens: {peak:,} blocks")


def _reserved(shape: ModelShape, request: PlanRequest, longest: int) -> int:
    """Tokens that are set aside for each sequence where there is no paging."""
    if request.max_model_len is not None:
        return request.max_model_len
    usual = min(RESERVED, shape.max_position)
    return usual if longest <= usual else max(longest, shape.max_position)


def on_load(answer: PlanReport, cache: Cache, request: PlanRequest, sequences: int) -> None:
    prefix, own, size = request.prefix, request.own, cache.block_size
    load = shared_load(cache, sequences, prefix, own)
    each = cache.block_bytes
    reserved = sequences * _reserved(cache.shape, request, prefix + own)
    section = answer.section(
        f"{words.count(sequences, 'sequence')} of {prefix:,} shared and {own:,} own tokens"
    )
    section.row("shared", f"{words.count(load.shared, 'block')}, {words.size(load.shared * each)}")
    section.row("not shared", f"{words.count(load.unshared, 'block')}, {words.size(load.unshared * each)}")
    states = sequences * RUNNING_SLOTS * cache.state_bytes
    if states:
        section.row("states", words.size(states))
    section.row("reserved ahead", words.size(reserved * cache.token_bytes))
    section.step(
        f"{prefix:,} / {size}: {load.full:,} full blocks are held once, {prefix % size} tokens by each"
    )
    section.step(
        f"{load.full:,} + {sequences:,} x {load.private:,} = {load.shared:,} blocks; without sharing "
        f"{sequences:,} x {load.unshared // sequences:,} = {load.unshared:,}, "
        f"{load.unshared / load.shared:.4f} times as many"
    )
    if cache.footprint.eviction_method.evicts:
        section.row(
            "under the budget",
            f"{words.count(load.compressed, 'block')}, {words.size(load.compressed * each)}; compressed "
            "sequences share nothing",
        )
    answer.set(
        sequences=sequences,
        prefix=prefix,
        own=own,
        blocks_shared=load.shared,
        blocks_unshared=load.unshared,
        blocks_compressed=load.compressed,
        kv_bytes_shared=load.shared * each,
        kv_bytes_unshared=load.unshared * each,
        kv_bytes_compressed=load.compressed * each,
        kv_bytes_contiguous=_whole(reserved * cache.token_bytes),
        state_bytes_of_sequences=states or None,
        sharing_ratio=load.unshared / load.shared,
    )
