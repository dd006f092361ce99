"""The plugin's options, and the fields that a request may change.

Operator: additional_config["kv_compression"], an object with the fields of CompressionConfig (`stats`: a file
that every worker can read), `calibrate`, `opt_in`, `snapshots`, `page_port` and `page_host`; or the same
object as JSON in the variable KVRECLAIM_VLLM. Request: extra_args["kv_compression"], "off", "on", or an
object with some of the fields of CompressionConfig but `stats`; as JSON text where only text can be sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import partial
from typing import Any

from kvreclaim.checks import check_bool, require
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policy import CompressionPolicy, Signal
from kvreclaim.compression.refusals import STATISTICS, policy_features
from kvreclaim.compression.registry import make_policy
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression_settings import AUTO, FULL
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.settings import page_address as address
from kvreclaim.integrations.vllm.settings.enabled import KEY, VARIABLE
from kvreclaim.integrations.vllm.settings.layer_needs import WATCHED, Serves, check_window, serves_all
from kvreclaim.integrations.vllm.settings.max_loss import (
    curve_in,
    density_of,
    in_place_of_budget,
)
from kvreclaim.integrations.vllm.settings.page_address import PageAddress
from kvreclaim.refusals import Feature, refuse
from kvreclaim.schedule.budget.footprint import SAME, Footprint

SUPPORTED = (
    "query_mixture, triattention, expected_attention, surrogate, kvzap, snapkv, tova, r_kv, knorm, keydiff, "
    "lagkv, random or streaming_llm, or shares(...) around one of them"
)
NOT_TAKEN = ("stats", "verify", "verify_tokens", "auto_budget", "budget_share", "policy_object")
"""Fields of CompressionConfig that are set elsewhere, or that vLLM's scheduler has no place for."""
Look = Callable[[bool], str | None]
"""Finds the file of the model's statistics where none is named; whether one may be made."""
_FLAGS = {"calibrate": True, "opt_in": False, "snapshots": False}
"""Fields of Options that are true or false, and their defaults."""
_FIELDS = tuple(field.name for field in fields(CompressionConfig) if field.name not in NOT_TAKEN)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the engine; checked, plain JSON in and out.

    settings:  of every request without its own
    stats:     file of query statistics
    calibrate: whether missing statistics are made if the policy needs them
    opt_in:    only requests with kv_compression are compressed
    page:      address of the page of the block pool; None: no page
    snapshots: whether requests begin with compressed prefixes of earlier ones with the same tokens
    density:   of the server's KV cache dtype (max_loss.density_of)
    """

    settings: CompressionConfig
    stats: str | None = None
    calibrate: bool = True
    opt_in: bool = False
    page: PageAddress | None = None
    snapshots: bool = False
    density: Fraction | None = field(default=SAME, compare=False)

    @classmethod
    def find(
        cls,
        additional_config: object,
        environ: Mapping[str, str],
        look: Look | None = None,
        serves: Serves = serves_all,
    ) -> Options | None:
        """The options, or None without compression. Raises: InvalidArgumentError, and what look
        raises."""
        has_config = isinstance(additional_config, Mapping) and KEY in additional_config
        found = additional_config[KEY] if isinstance(additional_config, Mapping) and has_config else None
        if VARIABLE not in environ:
            return cls.read(found, f"{KEY} in additional_config", look, serves) if has_config else None
        require(
            isinstance(additional_config, Mapping),
            f"{VARIABLE} is set, but additional_config is {type(additional_config).__name__}, which cannot "
            f"carry it to the workers; pass an object as additional_config, or unset {VARIABLE}.",
        )
        given = cls.read(_parse(environ[VARIABLE], VARIABLE), VARIABLE, look, serves)
        require(
            not has_config or cls.read(found, f"{KEY} in additional_config", look, serves) == given,
            f"{VARIABLE} and {KEY} in additional_config ask for different things; keep one of them.",
        )
        return given

    @classmethod
    def of_config(cls, vllm_config: Any) -> Options:
        """Return the options of a configuration that names our scheduler."""
        options = cls.find(vllm_config.additional_config, {})
        assert options is not None, "of a configuration without the option"
        return replace(options, density=density_of(vllm_config))

    @classmethod
    def read(
        cls, value: object, where: str, look: Look | None = None, serves: Serves = serves_all
    ) -> Options:
        """Read options from a JSON object. Raises: InvalidArgumentError, which names its source."""
        require(
            isinstance(value, Mapping),
            f"{where} is {value!r}; it must be an object such as "
            '{"policy": "streaming_llm", "budget": 2048}; leave it out to compress nothing.',
        )
        assert isinstance(value, Mapping)
        _check_names(value, (*_FIELDS, "stats", *_FLAGS, *address.FIELDS), where)
        settings = _changed(
            CompressionConfig(),
            in_place_of_budget({name: value[name] for name in value if name in _FIELDS}),
            where,
        )
        stats, flags = value.get("stats"), _FLAGS | {name: value[name] for name in value if name in _FLAGS}
        require(
            stats is None or isinstance(stats, str),
            f"stats in {where} is {stats!r}; it must be the path of a file of `kvreclaim calibrate`.",
        )
        for name, flag in flags.items():
            check_bool(f"{name} in {where}", flag)
        page, check = PageAddress.read(value, where), partial(serves, snapshots=flags["snapshots"])
        if settings.policy != AUTO:
            check(settings.make_policy())
        if stats is None and look is not None and _reads_stats(settings):
            stats = look(flags["calibrate"])
        if settings.policy == AUTO and settings.max_loss is None:
            settings = _changed(settings, {"policy": _best_that_fits(stats, where, check)}, where)
        if settings.max_loss is not None:
            curve = curve_in(stats, settings.max_loss)
            if settings.policy == AUTO:
                settings = _changed(settings, {"policy": curve.policy}, where)
                check(settings.make_policy())
            settings.promised(curve, AUTO, 1, 1)  # raises for another policy, or an unknown content
        options = cls(settings, stats, page=page, **flags)
        options._check_stats(where)
        return options

    def as_json(self) -> dict[str, Any]:
        """Return JSON from which `read` makes equal options."""
        return as_plain(self.settings) | {
            "stats": self.stats,
            "calibrate": self.calibrate,
            "opt_in": self.opt_in,
            "snapshots": self.snapshots,
            **address.as_json(self.page),
        }

    def of_request(self, extra_args: Mapping[str, Any] | None) -> CompressionConfig | None:
        """Return the request's compression; None: none. Raises: InvalidArgumentError."""
        if extra_args is None or KEY not in extra_args:
            return None if self.opt_in else _unless_full(self.settings)
        requested = extra_args[KEY]
        if isinstance(requested, str) and requested not in ("on", "off"):
            requested = _parse(requested, KEY)
        if requested == "off":
            return None
        if requested == "on":
            return _unless_full(self.settings)
        require(
            isinstance(requested, Mapping),
            f"{KEY} is {requested!r}; it must be 'off', 'on' or an object with some of {', '.join(_FIELDS)} "
            "(as JSON text where only text can be sent).",
        )
        _check_names(requested, _FIELDS, KEY)
        if requested.get("policy") == AUTO:
            require(
                self.stats is not None,
                f"policy auto in {KEY} is what calibration found best, and this server, started with "
                f"{self.settings.policy!r}, has no statistics; ask for that policy, or for another one "
                "without statistics such as streaming_llm or knorm.",
            )
            requested = {**requested, "policy": self.settings.policy}
        if "policy" in requested and requested["policy"] != self.settings.policy:
            requested = {"options": {}, **requested}
        if requested.get("policy") == FULL and self.settings.budget_share is not None:
            requested = {"budget": None, **requested}
        settings = _changed(self.settings, in_place_of_budget(dict(requested)), KEY)
        if settings.max_loss is not None:
            settings.promised(curve_in(self.stats, settings.max_loss), AUTO, 1, 1)
        self._check_request(settings)
        return _unless_full(settings)

    def of_prompt(
        self, settings: CompressionConfig | None, num_tokens: int, block_size: int
    ) -> CompressionConfig | None:
        """Settings of a request with the budget that a share, or max_loss, gives its prompt; None: everything
        stays. Raises: InvalidArgumentError."""
        if settings is None or not settings.is_of_prompt:
            return settings
        if settings.max_loss is None:
            if self.density is None:
                raise InvalidArgumentError(
                    f"budget is {settings.budget_share}, a share of the prompt's bytes, but layers of this "
                    "KV cache dtype take different bytes; give a number of tokens.",
                    field="budget",
                )
            found: CompressionConfig | None = settings.for_prompt(num_tokens, block_size, self.density)
            given, less = f"budget {100 * (settings.budget_share or 0):.4g}%", "ask for a smaller share"
        else:
            curve = curve_in(self.stats, settings.max_loss)
            found = _unless_full(settings.promised(curve, AUTO, num_tokens, block_size))
            given, less = f"max_loss {settings.max_loss}", "allow more loss"
        require(
            not is_bounded(self.settings) or found is None or found.budget <= self.settings.budget,
            f"{given} takes {found and found.budget} tokens for this prompt, and this server was started "
            f"with {self.settings.budget}; {less}, or give a budget in tokens.",
        )
        return found

    @property
    def has_cells(self) -> bool:
        """Whether heads may keep unequal numbers of tokens, for which attention must be prepared."""
        return self.settings.make_policy().eviction_method.uneven

    @property
    def watched(self) -> frozenset[Signal]:
        """Signals of layers that hooks keep, for all requests."""
        return self.settings.make_policy().needs & WATCHED

    def bound(self, block_size: int, max_chunk: int) -> int | None:
        """Return the most tokens that one compressed request holds; None: its whole length."""
        settings = self.settings.in_blocks(block_size)
        return settings.footprint(plain_footprint(block_size, max_chunk)).most_tokens

    def _check_stats(self, where: str) -> None:
        needs = self.settings.make_policy().needs & STATISTICS
        require(
            not needs or self.stats is not None,
            f"policy {self.settings.policy!r} in {where} needs query statistics; name a file of "
            '`kvreclaim calibrate` as "stats", or take a policy without them such as streaming_llm or knorm.',
        )

    def _check_request(self, settings: CompressionConfig) -> None:
        """The pool was sized by the engine's budget, and its statistics were loaded for its policy."""
        own = self.settings
        if is_bounded(own):
            for name in ("budget", "interval"):
                requested, limit = getattr(settings, name), getattr(own, name)
                is_open = name == "budget" and settings.is_of_prompt  # until the prompt is known
                require(
                    is_open or requested <= limit,
                    f"{name} is {requested} tokens; this server was started with {limit} and sized its "
                    f"memory by it; ask for {limit} or less, or turn compression off for this request.",
                )
            require(
                is_bounded(settings) or not settings.make_policy().eviction_method.evicts,
                f"policy {settings.policy!r} keeps whole prompts, for which this server, started with "
                f"{own.policy!r}, has not sized its memory; ask for a policy that compresses throughout.",
            )
        require(
            self.has_cells or not settings.make_policy().eviction_method.uneven,
            f"policy {settings.policy!r} lets heads keep unequal numbers of tokens, for which this server, "
            f"started with {own.policy!r}, has not made attention ready; ask for a policy with equal heads.",
        )
        policy, started = settings.make_policy(), own.make_policy()
        check_window(policy, started)
        missing = (policy.needs - started.needs) & STATISTICS
        require(
            not missing,
            f"policy {settings.policy!r} needs query statistics that this server, started with "
            f"{own.policy!r}, has not loaded; ask for that policy, or for one without statistics such as "
            "streaming_llm or knorm.",
        )


def as_plain(settings: CompressionConfig) -> dict[str, Any]:
    """JSON from which a request's settings are read as these."""
    own = {name: getattr(settings, name) for name in _FIELDS}
    own["budget"] = settings.budget_share or settings.budget
    return own | {"mode": None if settings.mode is None else str(settings.mode)}


def plain_footprint(block_size: int, max_chunk: int) -> Footprint:
    """The footprint of a request that is not compressed. max_chunk: most tokens of one step."""
    return Footprint(block_size=block_size, max_chunk=max_chunk, aligned=True)


def is_bounded(settings: CompressionConfig) -> bool:
    """Return whether a request never holds much more than its budget. Otherwise it may hold all tokens."""
    return settings.footprint(Footprint()).bounded


def check_policy(policy: CompressionPolicy) -> None:
    """Raise InvalidArgumentError for a policy that does not work inside vLLM."""
    refuse(policy_features(policy) | {Feature.VLLM: SUPPORTED})


def _reads_stats(settings: CompressionConfig) -> bool:
    return (
        settings.policy == AUTO
        or settings.max_loss is not None
        or bool(settings.make_policy().needs & STATISTICS)
    )


def _best_that_fits(stats: str | None, where: str, serves: Callable[[CompressionPolicy], None]) -> str:
    """The policy for auto inside vLLM: the best of the statistics' trial among those that run here.

    Raises: InvalidArgumentError, StatsMismatchError.
    """
    named = f"; name a policy in {where}, such as streaming_llm."
    require(
        stats is not None,
        "policy auto is what calibration finds best, and no statistics are named: name a file of `kvreclaim "
        f'calibrate` as "stats"{named}',
    )
    assert stats is not None
    trial = QueryStats.load(stats).metadata.trial
    require(trial is not None, f"the statistics {stats!r} hold no trial, which policy auto needs{named}")
    assert trial is not None
    for policy in trial.ranked:
        with suppress(InvalidArgumentError):
            check_policy(found := make_policy(policy))
            serves(found)
            return policy
    raise InvalidArgumentError(
        f"no policy of the trial in {stats!r} goes inside vLLM ({', '.join(trial.ranked)}){named}"
    )


def _unless_full(settings: CompressionConfig) -> CompressionConfig | None:
    return settings if settings.make_policy().eviction_method.evicts else None


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{where} is {text!r}, which is no JSON ({error}); write an object such as "
            '{"policy": "streaming_llm", "budget": 2048}.'
        ) from None


def _check_names(given: Mapping[str, object], allowed: tuple[str, ...], where: str) -> None:
    for name in given:
        hint = "; statistics are loaded when the server starts" if name == "stats" else ""
        require(name in allowed, f"{where} has no field {name!r}{hint}; its fields are {', '.join(allowed)}.")


def _changed(base: CompressionConfig, given: Mapping[str, Any], where: str) -> CompressionConfig:
    """base with the given fields, checked. Raises: InvalidArgumentError."""
    try:
        json.dumps(dict(given))  # it goes to other processes as JSON
        settings = replace(base, **given)
    except (TypeError, RecursionError) as error:
        raise InvalidArgumentError(f"{where} cannot be read: {error}; write plain JSON values.") from None
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error}") from None
    if settings.policy != AUTO:
        check_policy(settings.make_policy())
    return settings
