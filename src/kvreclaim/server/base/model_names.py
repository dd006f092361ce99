"""Names of models in requests, and the pages of their list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from kvreclaim.server.base.errors import ApiError


class Page(BaseModel):
    """Anthropic's pagination; limit None gives all."""

    model_config = ConfigDict(extra="forbid")

    limit: int | None = Field(None, ge=1, le=1000)
    after_id: str | None = None
    before_id: str | None = None

    def of(self, names: Sequence[str], entry: Callable[[str], Any]) -> dict[str, Any]:
        """Return the list of models: entry(name) for each name of the page. Raises: ApiError 404."""
        start = names.index(known(self.after_id, names)) + 1 if self.after_id is not None else 0
        stop = names.index(known(self.before_id, names)) if self.before_id is not None else len(names)
        between = names[start:stop]
        limit = self.limit if self.limit is not None else len(names)
        backwards = self.before_id is not None and self.after_id is None
        shown = between[-limit:] if backwards else between[:limit]
        return {
            "object": "list",
            "data": [entry(name) for name in shown],
            "has_more": len(shown) < len(between),
            "first_id": shown[0] if shown else None,
            "last_id": shown[-1] if shown else None,
        }


def known(model: str, names: Sequence[str]) -> str:
    """Return the name if it is one of these. Raises: ApiError 404."""
    if model not in names:
        raise ApiError(
            404,
            f"model {model!r} is not served here; this server has {', '.join(names)}.",
            param="model",
            code="model_not_found",
        )
    return model
