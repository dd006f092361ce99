"""The files of the page, as they are sent."""

from __future__ import annotations

import mimetypes
import re
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
INDEX = "index.html"
SERVERS = re.compile(rb"<!--server-->.*?<!--/server-->", re.DOTALL)
"""Parts of the page for our own server: the prompt box, and links to other routes."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """headers: all that belong to the content, an etag among them."""

    content: bytes
    headers: dict[str, str]

    @classmethod
    def make(cls, name: str, content: bytes) -> StaticFile:
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        own = {
            "etag": f'"{sha256(content).hexdigest()[:32]}"',
            "content-type": f"{kind}; charset=utf-8" if kind.startswith("text/") else kind,
        }
        return cls(content, HEADERS | own)


def static_files(*, read_only: bool) -> dict[str, StaticFile]:
    """Return the page's files by name, read once. read_only: without the parts that send prompts."""
    found = {}
    for file in (files("kvreclaim.page") / "static").iterdir():
        if file.is_file():
            content = file.read_bytes()
            found[file.name] = StaticFile.make(file.name, SERVERS.sub(b"", content) if read_only else content)
    return found
