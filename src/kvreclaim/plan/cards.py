"""Cards: memory, bandwidth, FLOP/s and price, from data/cards.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kvreclaim.errors import InvalidArgumentError

DATA = Path(__file__).parent / "data" / "cards.toml"


@dataclass(frozen=True, slots=True)
class Card:
    """One card. Bytes, bytes and FLOP a second, dollars an hour.

    memory_bytes:   of the data sheet; reported_bytes: what a driver says is there, where that is known
    nvlink, pcie:   of one direction; nvlink 0 where there is none
    price:          lowest and on demand; None: not known
    date:           of the file that it stands in
    """

    name: str
    memory_bytes: int
    bandwidth: float
    bf16_flops: float
    pcie: float
    nvlink: float = 0.0
    reported_bytes: int | None = None
    reported_by: str = ""
    price: tuple[float, float] | None = None
    aliases: tuple[str, ...] = ()
    date: str = ""

    @property
    def usable_bytes(self) -> int:
        """Usable memory: as drivers report it, else the data sheet's."""
        return self.reported_bytes or self.memory_bytes

    @property
    def link(self) -> float:
        """Bytes a second between two cards."""
        return self.nvlink or self.pcie

    def priced(self, price: float | None) -> Card:
        """Return the card at this price; None: at its own."""
        return self if price is None else replace(self, price=(price, price))


@cache
def all_cards() -> tuple[Card, ...]:
    """Return all cards in the order of the file."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return tuple(_card(row, data["date"]) for row in data["cards"])


def _card(row: dict[str, Any], date: str) -> Card:
    pairs: dict[str, Any] = {key: tuple(row[key]) for key in ("price", "aliases") if key in row}
    return Card(**{**row, **pairs, "date": date})


def find_card(name: str) -> Card:
    """Find a card by name or alias, in any case, with or without the vendor. Raises: InvalidArgumentError."""
    wanted = name.lower().removeprefix("nvidia ").removeprefix("geforce ").removeprefix("amd ").strip()
    for card in all_cards():
        if wanted in (card.name.lower(), *card.aliases):
            return card
    raise InvalidArgumentError(
        f"--gpu {name!r} is not known; known are {', '.join(card.name for card in all_cards())}; for another "
        "one pass --memory-bytes alone.",
        field="gpu",
    )
