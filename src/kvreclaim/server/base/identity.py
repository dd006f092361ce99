"""Identity of a request: its id, sent back in a header and part of every log line about it, and its tenant:
one per API key; cached blocks are never shared between tenants."""

from __future__ import annotations

import base64
import hmac
import json
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.types import Scope

from kvreclaim.server.base.config import ServerConfig

ANSWER_PREFIXES = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/v1/responses": "resp_",
    "/v1/messages": "msg_",
}


@dataclass(frozen=True, slots=True)
class Tenant:
    """name: a digest of the key, fit for logs; None without keys. operator: may see data of all tenants."""

    name: str | None
    operator: bool

    def salt(self, cache_salt: str | None) -> str | None:
        """Return the engine's cache salt: the tenant's, combined with the request's."""
        if self.name is None and cache_salt is None:
            return None
        return json.dumps([self.name, cache_salt])


def key_of(headers: Mapping[str, str]) -> str | None:
    """Return the API key of a request: `Authorization: Bearer` (OpenAI), `x-api-key` (Anthropic), or the
    password of HTTP Basic, for which browsers prompt."""
    if given := headers.get("x-api-key"):
        return given
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return value.strip() or None
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2] or None
        except ValueError:  # not base64, or not text
            return None
    return None


def tenant_name(secret: str, key: str) -> str:
    """Return a tenant's name in logs. The secret prevents guessing keys from it."""
    return hmac.new(secret.encode(), key.encode(), "sha256").hexdigest()[:16]


class Tenants:
    """The keys of a server; compared in constant time."""

    def __init__(self, config: ServerConfig) -> None:
        self._secret = config.tenant_secret or secrets.token_hex()
        self._keys = [key.encode() for key in config.api_keys]
        self._operator_key = config.operator_key.encode() if config.operator_key is not None else None

    def of(self, headers: Mapping[str, str]) -> Tenant | None:
        """Return the tenant of a request; None if its key is missing or unknown."""
        if not self._keys and self._operator_key is None:
            return Tenant(None, operator=True)
        given = key_of(headers)
        if given is None:
            return Tenant(None, operator=False) if not self._keys else None
        presented = given.encode()
        matches = [hmac.compare_digest(presented, key) for key in self._keys]
        operator = self._operator_key is not None and hmac.compare_digest(presented, self._operator_key)
        if not any(matches) and not operator:
            return None
        alone = self._operator_key is None and len(self._keys) == 1
        return Tenant(tenant_name(self._secret, given), operator or alone)


def new_request_id() -> str:
    return f"req-{uuid.uuid4().hex}"


def request_id_of(scope: Scope) -> str:
    request_id: str = scope["state"]["request_id"]
    return request_id


def answer_id(request_id: str, route: str) -> str:
    """Return the `id` of an answer's body: the request's id with the route's prefix."""
    return request_id.replace("req-", ANSWER_PREFIXES.get(route, "req-"), 1)
