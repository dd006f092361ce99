"""Why the tokens of a prompt were not found in the prefix index."""

from __future__ import annotations

from typing import Final

COLD: Final = "cold"
"""Never seen, or longer ago than is remembered."""
EVICTED: Final = "evicted"
"""Was there, and its block, or one before it, was reused lately."""
SALT: Final = "salt"
"""The prompt's first block is there, under another salt."""
SUB_BLOCK: Final = "sub_block"
"""The tail that fills no block; at least the one token that must be computed."""
INELIGIBLE: Final = "ineligible"
"""Nobody looked: caching is off, or the request may be served no longer prefix."""
CORRUPT: Final = "corrupt"
"""Another content lies under the same digest."""

MISS_REASONS: Final = (COLD, EVICTED, SALT, SUB_BLOCK, INELIGIBLE, CORRUPT)
