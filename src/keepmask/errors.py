"""Every exception keepmask raises on purpose.

::

    KeepmaskError
    ├── ConfigError    the engine or server cannot start as configured: change the configuration
    ├── RequestError   this request cannot be served: change the request (`param` names the field, `code` the kind)
    ├── MaskError      rows, ids or bytes that do not make a valid mask: fix what produced them
    ├── EngineError    the engine itself failed: every request in flight was answered, restart it
    └── BackendError   another engine could not be reached or answered something unusable

The first three are also `ValueError`, the last two also `RuntimeError`.
"""

from __future__ import annotations

__all__ = ["BackendError", "ConfigError", "EngineError", "KeepmaskError", "MaskError", "RequestError"]


class KeepmaskError(Exception):
    """Base of every exception raised by keepmask."""


class ConfigError(KeepmaskError, ValueError):
    """The engine or server cannot start as configured."""


class RequestError(KeepmaskError, ValueError):
    """One request cannot be served; the engine and its other requests are unaffected.

    message: begins with the field's name where one field is at fault. param: that name. code: what clients tell the
    kind of refusal by, where OpenAI has one for it: "context_length_exceeded".
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code

    def renamed(self, param: str) -> RequestError:
        """The same refusal of a field that the client knows by another name."""
        return RequestError(param + str(self).removeprefix(self.param or ""), param=param, code=self.code)


class MaskError(KeepmaskError, ValueError):
    """Rows, ids, counts or bytes that do not form a valid sampling mask."""


class EngineError(KeepmaskError, RuntimeError):
    """The engine failed as a whole; requests in flight were answered with this error."""


class BackendError(KeepmaskError, RuntimeError):
    """Another engine could not be reached, or its answer cannot be used."""
