"""HTTP without a client of its own. A machine that is busy answers late: nothing here gives up after 5 s."""

from __future__ import annotations

from functools import partial

import httpx2

LIMIT_S = 300
"""Longer than any wait of a test that passes."""

get = partial(httpx2.get, timeout=LIMIT_S)
post = partial(httpx2.post, timeout=LIMIT_S)
request = partial(httpx2.request, timeout=LIMIT_S)
stream = partial(httpx2.stream, timeout=LIMIT_S)
Client = partial(httpx2.Client, timeout=LIMIT_S)
