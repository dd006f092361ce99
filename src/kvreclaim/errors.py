"""Errors for callers. Each message states the problem, the given value, the allowed ones and a remedy."""


def printable(text: str) -> str:
    """Write every character that a terminal obeys, or cannot show, as an escape: names of files and what is
    in them may hold control sequences."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def reason_of(error: BaseException) -> str:
    """Return an exception of foreign code in one line: its type and its message."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) <= 300 else f'{text[:300]}...'}"


class KVReclaimError(Exception):
    """Base class of kvreclaim's errors.

    field: name of the wrong argument or setting ("template_kwargs.x": an entry of one); None if there is no
           single one. Programs may rely on it; messages may change.
    """

    def __init__(self, message: str = "", *, field: str | None = None) -> None:
        super().__init__("\n".join(map(printable, message.split("\n"))))  # it may quote a file
        self.field = field


class InvalidArgumentError(KVReclaimError, ValueError):
    """A value that is unknown, out of range or contradicts another one."""


class UnsupportedModelError(KVReclaimError, ValueError):
    """A model that the engine cannot run; the message names the reason."""


class FetchError(KVReclaimError, RuntimeError):
    """A model that could not be fetched or converted; no files are left."""


class StatsMismatchError(KVReclaimError, ValueError):
    """Query statistics that are malformed, incomplete or belong to another model."""


class UnsupportedVllmError(KVReclaimError, RuntimeError):
    """A vLLM version that the plugin does not support; the message names both versions and what differs."""


class RequestTooLongError(KVReclaimError, ValueError):
    """A request longer than a limit allows; the message names the limit and what to change."""


class UnknownRequestError(KVReclaimError, KeyError):
    """A request or sequence id that is unknown, or has ended."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class EngineDeadError(KVReclaimError, RuntimeError):
    """The engine has stopped; the message names the reason."""
