"""What can go wrong through a caller's doing. Each message says: what, got, allowed, what to do."""


class KVReclaimError(Exception):
    """Base of everything that kvreclaim raises on purpose.

    field: the argument or setting that is to blame, by its name ("template_kwargs.x": an entry of one); None
           where it is none or several. Programs go by it: a message may be worded anew, a field may not.
    """

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class InvalidArgumentError(KVReclaimError, ValueError):
    """A value that is unknown, out of range or contradicts another one."""


class UnsupportedModelError(KVReclaimError, ValueError):
    """A model that cannot run from a paged cache here; the message names the reason."""


class FetchError(KVReclaimError, RuntimeError):
    """A model that could not be fetched or converted; nothing of it was left behind."""


class StatsMismatchError(KVReclaimError, ValueError):
    """Query statistics that are malformed, incomplete or belong to another model."""


class UnsupportedVllmError(KVReclaimError, RuntimeError):
    """A vLLM that the plugin was not written for; the message names the versions and what differs."""


class RequestTooLongError(KVReclaimError, ValueError):
    """A request that a limit makes impossible; the message names the limit and what to change."""


class UnknownRequestError(KVReclaimError, KeyError):
    """A request or sequence id that is not (or no longer) known."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class EngineDeadError(KVReclaimError, RuntimeError):
    """The engine's thread cannot go on; the message names the reason."""
