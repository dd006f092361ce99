"""Operations on an engine, as data: any operation is possible at any moment, so any may be left out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from kvreclaim.chunks import SELECTIONS

FORMATS = ("fp32", "fp32", "int8+int4", "bf16", "fp16", "int8", "fp8_e4m3", "int4", "turboquant4")
KINDS = ("greedy", "greedy", "sampled", "sampled", "many", "score", "prompt_logprobs", "beams")
POLICIES = (
    "query_mixture",
    "triattention",
    "expected_attention",
    "snapkv(window=3)",
    "snapkv(window=3, when=prefill)",
    "surrogate",
    "shares(surrogate, floor=0.2)",
    "shares(streaming_llm, by=static)",
    "shares(kvzip)",
    "kvzap",
    "shares(kvzap)",
    "r_kv(window=3)",
    "h2o",
    "tova",
    "keydiff",
    "lagkv(lag=4)",
    "knorm",
    "streaming_llm",
    "streaming_llm(positions=cache)",
    "random",
    "paged_eviction",
    "quest",
    "full",
    "oracle",
    "critical(knorm)",
    "segments(tova, n=2)",
    "protect(knorm, first=3)",
    "pyramidkv(snapkv(window=3))",
    "protect(shares(surrogate), first=5, last=4)",
    "segments(ada_kv(snapkv(window=2)), n=2)",
    "ada_kv(snapkv(window=2), alpha=0)",
    "block-norm",
    "prompt-norm",
    "early-first",
    "head-norm",
    "brittle",
)
"""Every built-in policy, every way of compressing, wrappers; then the odd ones of the tests."""


SPARSE = (
    "pooled(alpha=0.9, rows=8, first=8, last=2, layers=0, block=4, sinks=1, local=1)",
    "pooled(alpha=0.5, rows=16, first=4, last=4, layers=1, block=8, sinks=0, local=0)",
)
"""Ways of computing a prompt sparsely, each with prefixes of its own."""


LIMITS = ("allowed", "bad_words", "bias", "pairs", "nested")
"""Parameters that restrict or lift the tokens that are drawn."""


@dataclass(frozen=True)
class Setup:
    """An engine. shadow: every attention call is compared, else answers alone; least_shared: tokens that are
    worth waiting for while others compute them; windows: a model family with sliding windows in some layers;
    plain_windows: these keep fp32; drafts: tokens that are guessed for a sequence at most; on_host: the
    blocks lie in host memory; conversations: turns go on from what earlier ones have kept; hybrid: a model
    family with some recurrent layers; state_checkpoints, state_interval, host_states: of these;
    broken_copies: of states to and from the host every so many fail."""

    kv_format: str = "fp32"
    kernels: str = "reference"
    num_blocks: int = 20
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    scheduling_policy: str = "fcfs"
    eviction_policy: str = "lru"
    prefix_caching: bool = True
    shadow: bool = True
    host_slots: int = 0
    preemption_mode: str = "auto"
    preemption_victim: str = "auto"
    write_policy: str = "write_through"
    prefix_snapshot_fraction: float = 0.25
    disk_slots: int = 0
    load_policy: str = "timeout"
    least_shared: int = 64
    windows: str = ""
    plain_windows: bool = False
    drafts: int = 0
    on_host: bool = False
    conversations: bool = False
    hybrid: str = ""
    state_checkpoints: int | None = None
    state_interval: int = 0
    host_states: int = 0
    broken_copies: int = 0


@dataclass(frozen=True)
class Ask:
    """A request. Its prompt: that of an earlier one with its answer (turn_of, counted from the last), or the
    beginning of one of few texts; then a tail.

    fault: None, "guilty" or "poison": a token in the middle of the tail that breaks things
    sinks: of its compression: 4 as if a system prompt of a block stood before the conversation
    reuse: which tokens of the prompt's chunks are computed anew, where it has some
    verify: its policy only drafts so many tokens at most, and the answer is that without it
    goes_on: as the next turn of a conversation it is compressed as the earlier one
    drops: spans of its prompt that leave the cache, of DROPS
    """

    text: int = 0
    cut: int = 12
    turn_of: int | None = None
    tail: tuple[int, ...] = (1,)
    policy: str | None = None
    budget: int = 12
    interval: int = 4
    kind: str = "greedy"
    seed: int = 0
    max_tokens: int = 8
    priority: int = 0
    salt: str | None = None
    stop: tuple[int, ...] = ()
    fault: str | None = None
    retention: int = 0
    tenant: str | None = None
    compress_prompt_at: int | None = None
    sparse: str | None = None
    reuse: str | None = None
    verify: int = 0
    limits: str | None = None
    sinks: int = 1
    goes_on: bool = False
    drops: int = 0


@dataclass(frozen=True)
class Abort:
    """One of those in flight."""

    which: int


@dataclass(frozen=True)
class Raise:
    """The next passes fail, when they have computed all but the last layer."""

    times: int


@dataclass(frozen=True)
class NotFinite:
    """The next pass meets NaN: in all rows, or in one."""

    rows: str | float


@dataclass(frozen=True)
class Brittle:
    """The next scoring of the policy "brittle" raises."""


@dataclass(frozen=True)
class Reset:
    """The prefix cache is forgotten."""


@dataclass(frozen=True)
class Step:
    """The engine steps so many times."""

    times: int = 1


Operation = Ask | Abort | Raise | NotFinite | Brittle | Reset | Step


@dataclass(frozen=True)
class Habits:
    """Habits of one walk: few policies and salts meet each other, and failures come in swarms."""

    policies: tuple[str | None, ...]
    kinds: tuple[str, ...]
    salts: tuple[str | None, ...]
    tenants: tuple[str | None, ...]
    asks: float
    raises: float
    not_finite: float
    special: float
    compress_prompt_at: int | None
    sparse: tuple[str | None, ...]
    reuse: tuple[str | None, ...]
    verify: tuple[int, ...]
    limits: tuple[str | None, ...]

    @classmethod
    def draw(cls, random: Random) -> Habits:
        return cls(
            policies=(None, *random.choices((*POLICIES, None), k=3)),
            kinds=(*random.choices(KINDS, k=2), random.choice(("many", "greedy"))),
            salts=random.choice(((None,), (None,), (None, "", "a"))),
            tenants=random.choice(((None,), ("x", "y"), ("x", "x", "x", "y"), ("x", "y", "z", None))),
            asks=random.choice((0.1, 0.2, 0.4)),
            raises=random.choice((0.0, 0.02, 0.2)),
            not_finite=random.choice((0.0, 0.0, 0.02)),
            special=random.choice((0.0, 0.05)),
            compress_prompt_at=random.choice((None, 14, 16, 20)),
            sparse=random.choice(((None,), (None,), (None, *SPARSE), SPARSE)),
            reuse=random.choice(((None,), (None, *SELECTIONS), SELECTIONS)),
            verify=random.choice(((0,), (0, 1, 5), (3, 8))),
            limits=random.choice(((None,), (None, *LIMITS), LIMITS)),
        )


UNTIED = tuple(policy for policy in POLICIES if "norm" not in policy)
"""Policies without those that go by the norms of keys: in the first layer these are equal wherever a token
stands again, so company decides."""


def crowded(random: Random, setup: Setup, operations: list[Operation]) -> tuple[Setup, list[Operation]]:
    """The same walk where all requests share a text, nearly all are compressed, with one or several outputs,
    and blocks are few: a pass over blocks that others read, too, finds none free."""
    setup = replace(
        setup,
        kv_format="fp32",
        shadow=False,
        windows="",
        plain_windows=False,
        drafts=0,
        prefix_caching=True,
        num_blocks=random.choice((8, 9, 10, 11, 12, 14, 17)),
        max_num_seqs=random.choice((4, 6)),
    )
    kinds = random.choices(("greedy", "sampled", "many", "many", "score", "beams"), k=3)
    policies = (*random.choices(UNTIED, k=2), None)
    return setup, [
        replace(
            each,
            text=0,
            cut=random.choice((8, 16, 20, 27)),
            tail=each.tail[:2],
            policy=random.choice(policies),
            interval=random.choice((4, 5, 8, 14)),
            kind=random.choice(kinds),
            max_tokens=14,
            salt=None,
            stop=(),
            sparse=None,
            reuse=None,
            verify=random.choice((0, 0, 0, 4)),
            compress_prompt_at=each.compress_prompt_at if random.random() < 0.3 else None,
        )
        if isinstance(each, Ask)
        else each
        for each in operations
    ]


def talking(random: Random, setup: Setup, operations: list[Operation]) -> tuple[Setup, list[Operation]]:
    """The same walk where most requests go on after an earlier answer, compressed as that was, and begin with
    what it has kept; only their attention is compared."""
    setup = replace(
        setup,
        conversations=True,
        shadow=True,
        prefix_caching=True,
        prefix_snapshot_fraction=random.choice((0.5, 1.0)),
        num_blocks=max(random.choice((12, 24)), setup.num_blocks),
        max_num_batched_tokens=min(16, setup.max_num_batched_tokens),
    )
    kinds = ("greedy", "sampled", "many", "prompt_logprobs")
    return setup, [
        replace(
            each,
            goes_on=random.random() < 0.8,
            turn_of=random.choice((None, 0, 1, 2)),
            kind=each.kind if each.kind in kinds else random.choice(kinds),
            max_tokens=random.choice((4, 9, 14)),
            verify=0,
            sparse=None,
            reuse=None,
        )
        if isinstance(each, Ask)
        else each
        for each in operations
    ]


DROPS: tuple[tuple[tuple[int, int], ...], ...] = (
    (),
    ((3, 12),),
    ((2, 14), (17, 22)),
    ((2, 14), (17, 36)),
)
"""Spans to drop, each time more than before."""


def dropping(random: Random, setup: Setup, operations: list[Operation]) -> tuple[Setup, list[Operation]]:
    """The same walk where most drop spans of their prompts, the later ones more."""
    num_asks = sum(isinstance(each, Ask) for each in operations)
    found: list[Operation] = []
    for each in operations:
        if isinstance(each, Ask):
            later = len([one for one in found if isinstance(one, Ask)]) * 2 > num_asks
            each = replace(
                each,
                drops=random.choice((0, 2, 3, 3) if later else (0, 1, 1, 2)),
                cut=random.choice((16, 20, 27)),
                policy=each.policy if random.random() < 0.7 else None,
                verify=0,
                sparse=None,
                reuse=None,
                compress_prompt_at=None,
            )
        found.append(each)
    return setup, found


def recurrent(random: Random, setup: Setup, operations: list[Operation]) -> tuple[Setup, list[Operation]]:
    """The same walk over a model some of whose layers are recurrent."""
    setup = replace(
        setup,
        hybrid=random.choice(("qwen3-next", "falcon-h1", "lfm2")),
        windows="",
        plain_windows=False,
        on_host=False,
        state_checkpoints=random.choice((0, 2, 8)),
        state_interval=random.choice((0, 0, 4, 12)),
        host_states=random.choice((0, 1, 3, 20)) if setup.host_slots else 0,
        broken_copies=random.choice((0, 0, 3)),
    )
    if not (setup.state_checkpoints and setup.host_states):
        setup = replace(setup, disk_slots=0)
    return setup, [replace(each, reuse=None) if isinstance(each, Ask) else each for each in operations]


def random_setup(random: Random) -> Setup:
    kv_format = random.choice(FORMATS)
    host_slots = random.choice((0, 1, 4, 12, 60, 200))
    prefix_caching = random.random() < 0.9
    windows = random.choice(("ministral", "llama4")) if random.random() < 0.4 else ""
    if windows == "llama4" or (windows and random.random() < 0.8):
        host_slots = 0
    return Setup(
        kv_format=kv_format,
        num_blocks=random.choice((6, 8, 12, 16, 24, 40, 120)),
        max_num_seqs=random.choice((2, 4, 6)),
        max_num_batched_tokens=random.choice((6, 16, 40)),
        scheduling_policy=random.choice(("fcfs", "priority", "cache")),
        eviction_policy=random.choice(("lru", "lru", "slru", "priority")),
        prefix_caching=prefix_caching,
        shadow=kv_format != "fp32" or random.random() < 0.3,
        host_slots=host_slots,
        preemption_mode=random.choice(("auto", "swap", "swap") if host_slots else ("auto", "recompute")),
        preemption_victim=random.choice(("auto", "auto", "last", "priority", "lru", "cost")),
        prefix_snapshot_fraction=random.choice((0.0, 0.25, 0.5, 1.0)),
        disk_slots=random.choice((0, 20, 200)) if host_slots and prefix_caching else 0,
        load_policy=random.choice(("timeout", "wait_complete", "best_effort", "race")),
        write_policy=random.choice(("write_through", "write_through_selective")),
        least_shared=random.choice((1, 4, 8, 64)),
        windows=windows,
        plain_windows=bool(windows)
        and not host_slots
        and kv_format in ("int8", "fp8_e4m3")
        and random.random() < 0.5,
        drafts=random.choice((0, 0, 1, 4)),
    )


def random_ask(random: Random, habits: Habits) -> Ask:
    """Few texts, tails and seeds: prompts share prefixes, and requests are repeated."""
    ask = Ask(
        text=random.randrange(3),
        cut=random.choice((1, 4, 8, 11, 16, 20, 27)),
        turn_of=random.randrange(4) if random.random() < 0.5 else None,
        tail=tuple(random.choices((5, 9, 17), k=random.choice((0, 1, 1, 2, 5)))),
        policy=random.choice(habits.policies),
        interval=random.choice((4, 6)),
        kind=random.choice(habits.kinds),
        seed=random.randrange(2),
        max_tokens=random.choice((1, 4, 9, 14)),
        priority=random.randrange(3),
        salt=random.choice(habits.salts),
        stop=random.choice(((), (), (7, 11, 30))),
        fault=random.choice(("guilty", "poison")) if random.random() < habits.special else None,
        retention=random.choice((0, 0, 0, 8)),
        tenant=random.choice(habits.tenants),
        compress_prompt_at=habits.compress_prompt_at if random.random() < 0.8 else None,
        sparse=random.choice(habits.sparse),
        reuse=random.choice(habits.reuse),
        verify=random.choice(habits.verify),
        limits=random.choice(habits.limits),
        sinks=random.choice((1, 1, 4)),
    )
    if ask.verify and ask.policy is not None:  # most other fields exclude it
        return replace(ask, compress_prompt_at=None, sparse=None, reuse=None)
    if ask.reuse is None:
        return ask
    policy = ask.policy if ask.seed else None  # most other fields exclude chunks
    cut = random.choice((ask.cut, 20, 27, 27))  # in a small pool only short prompts have room
    return replace(ask, cut=cut, policy=policy, compress_prompt_at=None, sparse=None)


def random_operations(random: Random, num_steps: int) -> list[Operation]:
    """A walk that steps so many times."""
    walk: list[Operation] = []
    habits = Habits.draw(random)
    for _ in range(num_steps):
        if random.random() < habits.asks:
            asks = [random_ask(random, habits) for _ in range(random.choice((1, 1, 3)))]
            walk += asks * random.choice((1, 1, 1, 3))  # several alike at once
        if random.random() < 0.03:
            walk.append(Abort(random.randrange(8)))
        if random.random() < habits.raises:
            walk.append(Raise(random.choice((1, 1, 1, 2))))
        if random.random() < habits.not_finite:
            walk.append(NotFinite(random.choice(("all", random.random()))))
        if random.random() < 0.01:
            walk.append(random.choice((Brittle(), Reset())))
        walk.append(Step())
    return walk
