"""Every exception keepmask raises on purpose.

::

    KeepmaskError
    ├── ConfigError    the engine or server cannot start as configured: change the configuration
    ├── RequestError   this request cannot be served: change the request (`param` names the field)
    ├── MaskError      rows, ids or bytes that do not make a valid mask: fix what produced them
    ├── EngineError    the engine itself failed: every request in flight was answered, restart it
    └── BackendError   another engine could not be reached or answered something unusable

The first three are also `ValueError`, the last two also `RuntimeError`.
"""

__all__ = ["BackendError", "ConfigError", "EngineError", "KeepmaskError", "MaskError", "RequestError"]


class KeepmaskError(Exception):
    """Base of every exception raised by keepmask."""


class ConfigError(KeepmaskError, ValueError):
    """The engine or server cannot start as configured."""


class RequestError(KeepmaskError, ValueError):
    """One request cannot be served; the engine and its other requests are unaffected.

    param: name of the offending request field, None where no single field is at fault.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class MaskError(KeepmaskError, ValueError):
    """Rows, ids, counts or bytes that do not form a valid sampling mask."""


class EngineError(KeepmaskError, RuntimeError):
    """The engine failed as a whole; requests in flight were answered with this error."""


class BackendError(KeepmaskError, RuntimeError):
    """Another engine could not be reached, or its answer cannot be used."""
