"""Which host a request is for, by its Host header."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address


def host_of(header: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether a page of another site sent a request. Programs send neither of the headers, so nothing of
    theirs is foreign.

    headers: by lower-case names. Browsers set Sec-Fetch-Site, older ones Origin alone; no page can.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        return site not in ("same-origin", "none")
    return origin is not None and origin.partition("//")[2].lower() != headers.get("host", "").lower()


def is_own(header: str | None, names: frozenset[str]) -> bool:
    """Whether a browser that sends this Host was led here by us: one of the names, in lower case, an address,
    or the loopback's. A foreign site can have its own name resolved to our address, but cannot have a browser
    send another name than its own. None, which no browser sends, is allowed."""
    if header is None:
        return True
    name = host_of(header)
    return name in names or is_address(name) or name.endswith(".localhost")
