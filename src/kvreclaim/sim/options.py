"""Options of a simulation, and values derived from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path

from kvreclaim.checks import require
from kvreclaim.compression.spec.promise import Promise, PromiseOptions, footprint_of_prompt
from kvreclaim.compression.spec.traits import footprint, is_share
from kvreclaim.kv_bytes import KVBytes, kv_bytes
from kvreclaim.memory.groups.state_slots import StateSizes
from kvreclaim.options import check_options, option
from kvreclaim.plan.cards import find_card
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.cost import Linear
from kvreclaim.plan.demand import Cache
from kvreclaim.plan.pool import Seats, make_pool, roomy_pool
from kvreclaim.plan.roofline import roofline
from kvreclaim.plan.shapes import ModelShape
from kvreclaim.plan.weights import dtype_of, state_bytes, weight_format
from kvreclaim.schedule.budget.footprint import Footprint, longest_sequence
from kvreclaim.schedule.rates import Rates
from kvreclaim.schedule.scheduler import POLICIES
from kvreclaim.sim.settings import Settings
from kvreclaim.sim.traces.drawn import ARRIVALS, PREFIX_PIECE, Arrivals, TrafficShape
from kvreclaim.sim.traces.files import read_trace
from kvreclaim.sim.traces.trace import Trace

MACHINE, LOAD, ENGINE = "Machine", "Load", "Engine"
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """The machine of one replica. Raises: InvalidArgumentError."""

    model: str = option(
        "meta-llama/Llama-3.1-8B", "Model: a config.json, its directory, a .gguf file, or a bundled name."
    )
    gpu: str | None = option(None, "Card, such as H100 or 4090.")
    tensor_parallel_size: int = option(1, "Number of cards per replica.", low=1, high=64)
    weights: str = option("auto", "Weight format: auto (the checkpoint's), bf16, fp8, awq4 and so on.")
    kv_cache_dtype: str = option("auto", "KV cache format.")
    utilization: float = option(
        0.92,
        "Share of the memory that the engine may use.",
        low=0.01,
        high=1.0,
        flags=("--utilization", "--utilisation", "--gpu-memory-utilization"),
    )
    num_blocks: int | None = option(
        None,
        "Number of blocks in the pool. Default: what the weights and the rest leave.",
        low=1,
        flags=("--num-blocks", "--num-gpu-blocks-override"),
    )
    calibration: Path | None = option(
        None, "Step times from `kvreclaim calibrate-speed`. Default: the card's data sheet."
    )
    price: float | None = option(
        None, "Dollars per hour and card. Default: the lowest known price.", low=0.0, high=1e6
    )

    def __post_init__(self) -> None:
        check_options(self)
        require(
            self.gpu is not None or (self.calibration is not None and self.num_blocks is not None),
            "--gpu is missing: name a card, or pass --calibration and --num-blocks, which say as much.",
            "gpu",
        )

    @cached_property
    def shape(self) -> ModelShape:
        return load_shape(self.model)

    def cost(self, block_size: int) -> Linear:
        """The cost model of a step."""
        if self.calibration is not None:
            return Linear.load(self.calibration)
        assert self.gpu is not None, "checked"
        card, stored = find_card(self.gpu), weight_format(self.weights, self.shape)
        parts = self.tensor_parallel_size
        return roofline(self.shape, card, stored, self.form, num_cards=parts, block_size=block_size)

    @property
    def form(self) -> KVBytes:
        """The format of keys and values."""
        return kv_bytes(self.kv_cache_dtype, dtype_of(self.shape))

    @property
    def density(self) -> Fraction:
        """Number of tokens in the bytes of one in the model's dtype."""
        return self.form.density(kv_bytes("auto", dtype_of(self.shape)), self.shape.attention)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of a block on all cards together."""
        return self.shape.block_bytes(self.form, block_size)

    def pool(self, footprint: Footprint, seats: Seats) -> tuple[int, int, StateSizes | None]:
        """Blocks, sequences and slots of recurrent layers, as `kvreclaim plan` counts them; with num_blocks,
        slots for max_num_seqs sequences. Raises: InvalidArgumentError if there is no room."""
        if self.num_blocks is not None:
            states = seats.slots(seats.max_num_seqs) if self.shape.has_states else None
            return self.num_blocks, seats.max_num_seqs, states
        assert self.gpu is not None, "checked"
        card, form = find_card(self.gpu), self.form
        build = partial(
            make_pool,
            Cache(self.shape, form, footprint),
            card.usable_bytes,
            weight_format(self.weights, self.shape),
            utilization=self.utilization,
            other_bytes=None,
            seats=seats,
        )
        found = roomy_pool(
            card.name, self.shape, self.tensor_parallel_size, lambda size: build(num_cards=size)
        )
        return found.num_blocks, found.num_seqs, found.states

    def hourly(self) -> float | None:
        """Dollars of a replica; None: not known."""
        if self.price is not None:
            return self.price * self.tensor_parallel_size
        known = find_card(self.gpu).price if self.gpu is not None else None
        return None if known is None else known[0] * self.tensor_parallel_size

    def rates(self, block_size: int, cost: Linear) -> Rates:
        """Rates that decide preemption."""
        moved = cost.move / self.bytes_per_block(block_size) if cost.move else 1e-10
        return Rates(token_s=cost.beyond + cost.token, token_sq_s=cost.pair, out_s=moved, in_s=moved)


@dataclass(frozen=True, kw_only=True)
class Serving(PromiseOptions):
    """Settings of the engine, as in `kvreclaim serve`. Raises: InvalidArgumentError."""

    block_size: int = option(16, "Tokens per block.", low=1)
    max_num_seqs: int = option(256, "Maximum number of sequences in one step.", low=1)
    max_num_batched_tokens: int = option(2048, "Maximum number of tokens in one step.", low=1)
    max_model_len: int | None = option(
        None, "Maximum length of a sequence. Default: the model's limit.", low=1
    )
    compression: str | None = option(
        None,
        "Compression of every request, such as triattention:budget=1024,interval=128, or :budget=20% of each "
        "prompt. Default: none.",
    )
    spread_compression: bool = option(True, "Compress requests that arrive together at different steps.")
    enable_prefix_caching: bool = option(True, "Share the blocks of equal prefixes.")
    state_checkpoints: int | None = option(
        None,
        "Models with recurrent layers: states kept for prefix hits. Default: as many as --max-num-seqs.",
        low=0,
    )
    state_checkpoint_interval: int = option(
        0,
        "Models with recurrent layers: keep a state every so many tokens of a prompt, a multiple of "
        "--block-size, too. 0: only where prompts end or part, and where answers end.",
        low=0,
    )
    scheduling_policy: str = option("fcfs", "Queue order: fcfs, priority or cache.", choices=POLICIES)
    eviction_policy: str = option("lru", "Eviction order of cached blocks.")
    preemption_mode: str = option(
        "auto",
        "What happens to a preempted sequence: auto, swap or recompute.",
        choices=("auto", "swap", "recompute"),
    )
    preemption_victim: str = option(
        "auto",
        "Which sequence to preempt: auto, last, priority, lru or cost.",
        choices=("auto", "last", "priority", "lru", "cost"),
    )
    kv_offloading_size: float = option(
        0.0, "GiB of host memory per replica for evicted prefixes and swapped sequences.", low=0.0, high=1e6
    )
    kv_offloading_state_fraction: float = option(
        0.25,
        "Models with recurrent layers: share of --kv-offloading-size for states at prefixes' ends.",
        low=0.0,
        high=1.0,
    )

    def __post_init__(self) -> None:
        check_options(self)
        require(
            self.state_checkpoint_interval % self.block_size == 0,
            f"state_checkpoint_interval is {self.state_checkpoint_interval}, but hits end after blocks of "
            f"{self.block_size} tokens; pass a multiple.",
            "state_checkpoint_interval",
        )

    def footprint(self) -> Footprint:
        """The footprint of every request, the largest under max_loss, or with a share of the prompt."""
        size, chunk = self.block_size, self.max_num_batched_tokens
        if self.compression is None:
            return Footprint(block_size=size, max_chunk=chunk)
        return footprint(self.compression, block_size=size, max_chunk=chunk)

    def promise_on(self, machine: ReplicaOptions) -> Promise | None:
        """Return the promise of max_loss in the machine's KV cache dtype; None without max_loss."""
        return self.promise(self.compression, machine.kv_cache_dtype, dtype_of(machine.shape))

    def by_prompt(self, machine: ReplicaOptions) -> Callable[[int], Footprint] | None:
        """Footprints by the length of the prompt, with max_loss or a share; None: all have one."""
        lengths = {"block_size": self.block_size, "max_chunk": self.max_num_batched_tokens}
        if (promise := self.promise_on(machine)) is not None:
            return partial(promise.footprint, **lengths)
        if self.compression is None or not is_share(self.compression):
            return None
        return partial(footprint_of_prompt, self.compression, density=machine.density, **lengths)

    def seats(self) -> Seats:
        """Sequences that take slots of recurrent layers, as in the engine."""
        return Seats(
            self.max_num_seqs,
            each=2 + (self.kv_offloading_size > 0),
            checkpoints=self.state_checkpoints if self.enable_prefix_caching else 0,
            interval=self.state_checkpoint_interval,
        )

    def settings(self, machine: ReplicaOptions, cost: Linear) -> Settings:
        """The settings of each replica."""
        per_block, footprint = machine.bytes_per_block(self.block_size), self.footprint()
        by_prompt = self.by_prompt(machine)
        num_blocks, num_seqs, states = machine.pool(footprint, self.seats())
        longest, limit = self.max_model_len, machine.shape.max_position
        require(
            longest is None or longest <= limit,
            f"max_model_len is {longest}, but {machine.model} was made for {limit} positions; lower it, or "
            "leave it out.",
            "max_model_len",
        )
        given = self.state_checkpoints is not None or self.state_checkpoint_interval
        require(
            states is not None or not given,
            "state_checkpoints and state_checkpoint_interval are about recurrent layers, and "
            f"{machine.model} has none; leave them out.",
            "state_checkpoints",
        )
        host_bytes, host_states = int(self.kv_offloading_size * GIB), 0
        if states is not None and states.num_checkpoints:
            host_states = int(host_bytes * self.kv_offloading_state_fraction) // state_bytes(machine.shape)
        held = longest_sequence(None, longest or 1, footprint, num_blocks)
        require(
            longest is None or held == longest,
            f"max_model_len is {longest}, but the pool of {num_blocks} blocks of {self.block_size} holds "
            f"{held} tokens of one sequence; lower it, leave it out, or compress within a budget that fits.",
            "max_model_len",
        )
        return Settings(
            num_blocks=num_blocks,
            block_size=self.block_size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=longest or limit,
            footprint=footprint,
            scheduling_policy=self.scheduling_policy,
            preemption_victim=self.preemption_victim,
            preemption_mode=self.preemption_mode,
            eviction_policy=self.eviction_policy,
            enable_prefix_caching=self.enable_prefix_caching,
            host_blocks=(host_bytes - host_states * state_bytes(machine.shape)) // per_block,
            host_states=host_states,
            bytes_per_block=per_block,
            rates=machine.rates(self.block_size, cost),
            spread=self.spread_compression,
            by_prompt=by_prompt,
            states=states,
        )


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Requests of a file, or random ones. Raises: InvalidArgumentError."""

    trace: Path | None = option(None, "File of requests. Default: random requests.")
    requests: int | None = option(None, "Number of requests; of a file, the first ones.", low=1)
    speed: float = option(1.0, "Speed-up factor of the arrivals.", low=1e-6, high=1e6)
    rate: float | None = option(None, "Requests per second, instead of the file's times.", low=1e-9, high=1e9)
    arrivals: str = option(
        "poisson", f"Distribution of arrivals at --rate: {', '.join(ARRIVALS)}.", choices=ARRIVALS
    )
    burstiness: float = option(2.0, "Burstiness of gamma arrivals; 1 is poisson.", low=0.01, high=100.0)
    prompt: int = option(1024, "Tokens of a random prompt, or of each turn's question.", low=1)
    output: int = option(256, "Tokens of a random answer.", low=1)
    prefix: int = option(0, "Tokens of a prefix that all random prompts share.", low=0, high=PREFIX_PIECE)
    vary: float = option(0.0, "Coefficient of variation of random lengths.", low=0.0, high=10.0)
    turns: int = option(1, "Turns per random conversation.", low=1)
    think: float = option(0.0, "Mean seconds from an answer to the next question.", low=0.0, high=1e9)
    seed: int = option(0, "Seed of everything that is random.", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        require(
            self.trace is not None or (self.requests is not None and self.rate is not None),
            "--trace is missing: name a file of requests, or draw some with --requests and --rate.",
            "trace",
        )
        drawn = ("prompt", "output", "prefix", "vary", "turns", "think")
        if self.trace is not None:
            self._refuse(drawn, "a file of requests")
        if self.rate is None:
            self._refuse(("arrivals", "burstiness"), "the file's own times, which --rate replaces")

    def _refuse(self, names: tuple[str, ...], source: str) -> None:
        """Refuse options that would have no effect."""
        given = {each.name: each.default for each in fields(self)}
        useless = [f"--{name}" for name in names if getattr(self, name) != given[name]]
        require(not useless, f"{', '.join(useless)} has no effect beside {source}; leave it out.", "trace")

    def requested(self) -> Trace:
        """Return all requests."""
        times = None
        if self.rate is not None:
            times = Arrivals(self.rate, self.arrivals, self.burstiness, self.seed)
        if self.trace is not None:
            trace = read_trace(self.trace).first(self.requests)
            return (trace if times is None else times.over(trace)).sped(self.speed)
        assert times is not None, "checked"
        assert self.requests is not None, "checked"
        shape = TrafficShape(
            self.requests,
            self.prompt,
            self.output,
            prefix=self.prefix,
            turns=self.turns,
            think_s=self.think,
            vary=self.vary,
            seed=self.seed,
        )
        return shape.trace(times).sped(self.speed)


def without_compression(serving: Serving) -> Serving:
    """Return the settings without compression."""
    return replace(serving, compression=None, max_loss=None, content=None, stats=None)
