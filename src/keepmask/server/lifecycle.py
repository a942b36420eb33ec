"""`DrainingServer`: uvicorn that, told to stop, first finishes what it has begun."""

from __future__ import annotations

import logging
import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from keepmask.errors import ConfigError
from keepmask.server.connection import Connection
from keepmask.server.service import Service
from keepmask.server.settings import ServerConfig

__all__ = ["DrainingServer", "build_server", "check_address"]

_log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75  # longer than the pools of common HTTP clients keep idle connections


class DrainingServer(uvicorn.Server):
    """On the first SIGTERM or SIGINT takes no more requests and finishes those under way; on the second, ends them."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The signal handler: it may interrupt anything, so it only takes notes."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called once `should_exit` was seen."""
        _log.info("stopping; %d requests under way are finished first", len(self._service.tickets()))
        self._service.drain()
        await super().shutdown(sockets)
        if self.force_exit:
            _log.warning("stopped at once; %d requests were not finished", len(self._service.tickets()))


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
    config = service.config
    return DrainingServer(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            # h11's, for its bound on the size of headers, which httptools lacks
            http=Connection,
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
