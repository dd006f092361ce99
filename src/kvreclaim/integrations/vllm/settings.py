"""How a request is compressed: the fields of CompressionConfig but the statistics, hashable and picklable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvreclaim.compression import CompressionConfig, CompressionPolicy, make_policy
from kvreclaim.compression.config import StatsSource
from kvreclaim.compression.registry import DEFAULT_POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Fields as in CompressionConfig; options as canonical JSON of an object.

    Not checked here: make_config checks.
    """

    policy: str = DEFAULT_POLICY
    budget: int = 2048
    interval: int = 128
    sinks: int = 4
    recent: int = 128
    protect_prompt: bool = False
    mode: str | None = None
    options: str = "{}"

    def changed(self, fields: Mapping[str, Any]) -> Settings:
        """With some fields replaced; options given as a mapping."""
        values = dict(fields)
        if "options" in values:
            values["options"] = json.dumps(values["options"], sort_keys=True)
        return replace(self, **values)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, options as an object."""
        return asdict(self) | {"options": json.loads(self.options)}

    def make_policy(self) -> CompressionPolicy:
        """The policy with its options. Raises: InvalidArgumentError."""
        return make_policy(self.policy, json.loads(self.options))

    def make_config(self, stats: StatsSource | None = None) -> CompressionConfig:
        """Checked. Raises: InvalidArgumentError."""
        return CompressionConfig(**self.as_json(), stats=stats)
