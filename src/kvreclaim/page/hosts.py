"""Which host a request is for, by its Host header."""

from __future__ import annotations

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


def is_own(header: str | None, names: frozenset[str]) -> bool:
    """Whether a browser that sends this Host was led here by us: one of the names, in lower case, an address,
    or the loopback's. A foreign site can have its own name resolved to our address, but cannot have a browser
    send another name than its own. None, which no browser sends, is allowed."""
    if header is None:
        return True
    name = host_of(header)
    return name in names or is_address(name) or name.endswith(".localhost")
