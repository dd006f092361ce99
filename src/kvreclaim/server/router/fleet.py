"""The models and their processes: which are loaded, and which gives way."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvreclaim.checks import require
from kvreclaim.server.base.config import Preset, RouterConfig, ServerConfig
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.http.draining import LAST_BYTES_S
from kvreclaim.server.router.child import Child

logger = logging.getLogger(__name__)
POLL_S = 0.1
POOL_FRACTION = 0.5
"""Share of the free memory for the pools of all models, where no limit is set."""


class Fleet:
    """Models by their names, each with a process while it is loaded.

    children: of loaded models and those that load, by their first names
    facts:    entries of /v1/models of models that have been loaded
    """

    def __init__(
        self, presets: Sequence[Preset], config: ServerConfig, routing: RouterConfig, limit_gib: float | None
    ) -> None:
        self.presets = {name: preset for preset in presets for name in preset.names}
        self.config = config
        self.idle_timeout_s = routing.idle_timeout_s
        self.most = min(routing.max_loaded, len(presets))
        self.limit_gib = limit_gib
        self.draining = asyncio.Event()
        self.children: dict[str, Child] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self._turn = asyncio.Lock()
        """Held while a request finds or starts its model, in the order of arrival. While one waits for room,
        later ones wait behind it, so a model in constant use cannot keep another out."""
        single = config.api_keys[0] if len(config.api_keys) == 1 else None
        self._key = config.operator_key or single or (secrets.token_hex() if config.api_keys else None)
        self.registry = CollectorRegistry()
        count = partial(Counter, labelnames=["model_name"], registry=self.registry)
        self._loads = count("kvreclaim:model_loads", "Starts of a model's process.")
        self._unloads = count("kvreclaim:model_unloads", "Ends of a model's process.")
        loaded = Gauge("kvreclaim:models_loaded", "Models that load or are loaded.", registry=self.registry)
        loaded.set_function(lambda: len(self.children))
        for preset in presets:
            require(
                limit_gib is None or self._memory_gib(preset) <= limit_gib,
                f"{preset.names[0]} has memory-limit {preset.memory_gib}, but all models together have "
                f"{limit_gib} GiB (--memory-limit); lower it, or raise that.",
            )

    @asynccontextmanager
    async def using(self, preset: Preset) -> AsyncIterator[Child]:
        """Give the model's process, loaded, which is not stopped inside the block."""
        with ExitStack() as stack:
            async with self._turn:
                child = self.children.get(preset.names[0]) or await self._start(preset)
                stack.enter_context(child.used())
            self.facts[child.name] = await asyncio.shield(child.ready)
            yield child

    async def _make_room(self, preset: Preset) -> None:
        """Stop models that run nothing, the least recently used first, or wait for one. Raises: ApiError."""
        waits = False
        while not self._fits(preset) and not self.draining.is_set():
            idle = sorted((each for each in self.children.values() if each.is_idle), key=lambda it: it.used_s)
            free = [child for child in idle if await child.is_free()]
            if self._fits(preset, without=free):
                await self._stop(free[0])
                continue
            if not waits:
                logger.info("%s waits until a loaded model has answered its requests", preset.names[0])
            waits = True
            await asyncio.sleep(POLL_S)
        if self.draining.is_set():
            raise ApiError(503, "the server is shutting down; send the request to another one.")

    async def _start(self, preset: Preset) -> Child:
        await self._make_room(preset)
        name = preset.names[0]
        memory = f"--kv-memory-fraction={POOL_FRACTION / self.most:.3f}"
        if self.limit_gib is not None:
            memory = f"--memory-limit={self._memory_gib(preset)}"
        own = (memory, f"--served-model-name={name}", *preset.arguments)  # of equal options the last counts
        child = await Child.start(name, [*own, *self.options()], self._key, self._ended)
        self.children[name] = child
        self._loads.labels(name).inc()
        logger.info("loading %s", name)
        return child

    async def _stop(self, child: Child) -> None:
        await child.stop(self.config.shutdown_timeout_s + 2 * LAST_BYTES_S)

    def _ended(self, child: Child, code: int) -> None:
        del self.children[child.name]
        self._unloads.labels(child.name).inc()
        if child.stopping:
            logger.info("unloaded %s", child.name)
        else:
            logger.error("the process of %s has ended by itself (exit code %d)", child.name, code)

    async def unload_idle(self) -> None:
        """Stop what has not been used for the idle time, again and again."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(1.0, self.idle_timeout_s / 4))
            for child in list(self.children.values()):
                if not child.is_idle or clock() - child.used_s < self.idle_timeout_s:
                    continue
                async with self._turn:
                    if child.is_idle and await child.is_free():
                        await self._stop(child)
                    else:
                        child.touch()

    async def stop_all(self) -> None:
        """Stop every model once its requests have ended."""
        self.draining.set()
        async with self._turn:
            await asyncio.gather(*(self._stop(child) for child in list(self.children.values())))

    def options(self) -> list[str]:
        """Options of every model's process. Their limits on connections count this server as one client."""
        config = self.config
        operator = self._key if config.operator_key or len(config.api_keys) > 1 else None
        return [
            f"--max-connections={config.max_connections}",
            f"--max-connections-per-address={config.max_connections}",
            f"--shutdown-timeout={config.shutdown_timeout_s}",
            *(f"--api-key={key}" for key in config.api_keys),
            *([] if operator is None else [f"--operator-key={operator}"]),
            *([] if config.tenant_secret is None else [f"--tenant-secret={config.tenant_secret}"]),
        ]

    def _memory_gib(self, preset: Preset) -> float:
        return preset.memory_gib or (self.limit_gib or 0.0) / self.most

    def _fits(self, preset: Preset, without: Sequence[Child] = ()) -> bool:
        """Whether the model may be loaded beside the others, less these."""
        left = [name for name, child in self.children.items() if child not in without]
        taken = sum(self._memory_gib(self.presets[name]) for name in left)
        within = self.limit_gib is None or taken + self._memory_gib(preset) <= self.limit_gib + 1e-6
        return within and len(left) < self.most
