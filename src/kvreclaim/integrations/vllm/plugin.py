"""The entry point `vllm.general_plugins`, which vLLM calls in each process before it is configured."""

from __future__ import annotations


def register() -> None:
    """Wrap the two functions that make compression possible to ask for. Idempotent.

    An exception here would end a vLLM that never asked for us, so whatever another version lacks is left to
    the check that runs once compression is asked for.
    """
    from kvreclaim.integrations.vllm.hooks import install

    install()
