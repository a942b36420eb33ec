"""`DrainingServer`: uvicorn that, told to stop, first finishes what it has begun."""

from __future__ import annotations

import asyncio
import logging
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from keepmask.errors import ConfigError
from keepmask.server.connection import Connection, connection_limit
from keepmask.server.service import Service
from keepmask.server.settings import ServerConfig

__all__ = ["DrainingServer", "build_server", "check_address"]

_log = logging.getLogger(__name__)

_LAST_WORDS_S = 5.0  # for clients to take their answers once everything has been ended
_MANY_CONNECTIONS = 4096
_KEEP_ALIVE_S = 75  # longer than the pools of common HTTP clients keep idle connections


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT takes no more requests and finishes those under way, for as long as the
    configuration lets it; on the second, stops at once.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @property
    def exit_code(self) -> int:
        """0 where everything begun was finished, 1 where it was not or the engine had failed."""
        return int(self.force_exit or self._service.engine.crashed)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: it may interrupt anything, so it only takes notes."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called once `should_exit` was seen."""
        tickets = self._service.tickets()
        _log.info("stopping; %d requests under way are finished first, or a second signal ends them", len(tickets))
        self._service.drain()
        loop, drain_s = asyncio.get_running_loop(), self._service.config.drain_timeout_s
        timers = [loop.call_later(drain_s, self._end), loop.call_later(drain_s + _LAST_WORDS_S, self._force)]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()
        if self.force_exit:
            _log.warning("stopped at once; %d requests were not finished", len(self._service.tickets()))
            # The end of the event loop cancels what is left, which uvicorn takes for errors of the application.
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)

    def _end(self) -> None:
        """Answer what is still under way with what it has."""
        _log.warning("%d requests took longer than drain_timeout_s", len(self._service.tickets()))
        self._service.engine.abort(self._service.tickets())

    def _force(self) -> None:
        """Whoever still sends or takes nothing is left behind."""
        self.force_exit = True


def check_address(config: ServerConfig) -> None:
    """Raise ConfigError where the server could not listen: known at once, not after minutes of loading a model."""
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"host={config.host!r}: is no address: {error.strerror}; give one of this machine") from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise ConfigError(
                f"port={config.port}: cannot listen at {config.host}: {error.strerror}; stop what listens there, or "
                "give another --port"
            ) from None


def build_server(app: ASGIApp, service: Service) -> DrainingServer:
    """The HTTP server for `app`, ready to `run`."""
    config, most = service.config, connection_limit()
    _log.info("up to %d connections at a time", most)
    return DrainingServer(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            # h11's, for its bound on the size of headers, which httptools lacks
            http=type("LimitedConnection", (Connection,), {"most": most}),
            # Out of file descriptors, asyncio lets clients wait, uvloop resets their connections.
            loop="auto" if most > _MANY_CONNECTIONS else "asyncio",
            h11_max_incomplete_event_size=config.max_header_bytes,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        ),
        service,
    )
