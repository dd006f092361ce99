"""Ids of the Hugging Face hub, looked up before anything heavy is imported and without retries."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kvreclaim.errors import InvalidArgumentError

TIMEOUT_S = 5.0
_ABSENT = (401, 403, 404)
"""Statuses of the hub for a model that is not there, or that the token may not read."""


def is_hub_id(name: str) -> bool:
    """Return whether it may be owner/name, or one of the few ids without an owner."""
    return re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", name) is not None


def without_hub(name: str) -> str:
    """Return owner/name of hf.co/owner/name, as ollama writes it, or of a page's address; else the name."""
    return re.sub(r"^(https://)?(hf\.co|huggingface\.co)/", "", name)


def is_cached(repo: str) -> bool:
    """Return whether files of a model are in the hub's cache on this machine."""
    from huggingface_hub.constants import HF_HUB_CACHE

    snapshots = Path(HF_HUB_CACHE, f"models--{repo.replace('/', '--')}", "snapshots")
    return next(snapshots.glob("*/*"), None) is not None


def why_not_on_hub(repo: str) -> str | None:
    """Why the hub does not give a model, as a clause; None if it may. One request, of TIMEOUT_S at most."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
    from huggingface_hub.utils import build_hf_headers

    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    request = Request(f"{ENDPOINT}/api/models/{repo}", method="HEAD", headers=build_hf_headers())
    try:
        with urlopen(request, timeout=TIMEOUT_S):
            return None
    except HTTPError as error:
        return f"the hub has no such model for you (status {error.code})" if error.code in _ABSENT else None
    except (OSError, ValueError) as error:
        return f"the hub is out of reach ({getattr(error, 'reason', error)})"


def hub_options(name: str) -> dict[str, bool]:
    """Options of transformers' from_pretrained for a directory or a hub id: cached files alone where the hub
    does not answer. Raises: InvalidArgumentError for an id that is not in the cache either."""
    if os.path.exists(name) or not is_hub_id(name) or (reason := why_not_on_hub(name)) is None:
        return {}
    if is_cached(name):
        return {"local_files_only": True}
    raise InvalidArgumentError(
        f"model {name!r} is no directory here, and {reason}; pass a local directory with config.json and "
        "*.safetensors, or a hub id.",
        field="model",
    )
