"""What clients are told when something is refused or fails: OpenAI's error object, with vLLM's type names."""

from __future__ import annotations

import logging

import pydantic_core
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepmask.errors import EngineError, KeepmaskError, MaskError, RequestError

__all__ = ["ApiError", "Unforeseen", "describe", "error_body", "error_response"]

_log = logging.getLogger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    406: "NotAcceptableError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


class ApiError(KeepmaskError):
    """An answer other than 200.

    code: what tells it from others of its status. retry_after_s goes into the Retry-After header; close ends the
    connection.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.retry_after_s, self.close = retry_after_s, close


def describe(error: Exception) -> ApiError:
    """The answer to a request that ended with this exception. Internals are not shown: they are in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, MaskError):
        return ApiError(400, str(error))
    if isinstance(error, EngineError):
        return ApiError(500, str(error))
    return ApiError(500, "internal error; the server's log has the details")


def error_body(error: ApiError) -> bytes:
    """`{"error": {message, type, param, code}}`, UTF-8."""
    body = {
        "message": str(error),
        "type": _TYPES.get(error.status, "APIError"),
        "param": error.param,
        "code": error.status if error.code is None else error.code,
    }
    return pydantic_core.to_json({"error": body})


def error_response(error: Exception) -> Response:
    """The HTTP answer."""
    shown = describe(error)
    headers = {}
    if shown.retry_after_s is not None:
        headers["retry-after"] = str(shown.retry_after_s)
    if shown.status == 401:
        headers["www-authenticate"] = "Bearer"
    if shown.close:
        headers["connection"] = "close"
    return Response(error_body(shown), shown.status, headers, media_type="application/json")


class Unforeseen:
    """ASGI middleware, next to the routes: an exception that nobody expected is logged and answered 500.

    The connection stays usable, where the server would close it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        begun = False

        async def note(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception as error:  # the request's border
            if scope["type"] != "http" or begun:
                raise
            _log.exception("a request failed")
            await error_response(error)(scope, receive, send)
