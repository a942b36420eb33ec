"""Stopping: what is under way is finished, for as long as it may take."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from serving import Serving, until

LONG = {"max_tokens": 400, "top_k": 4, "ignore_eos": True}


def test_drain_ends_what_takes_too_long_with_what_it_has(checkpoint: Path):
    with Serving(checkpoint, drain_timeout_s=0.5) as serving, serving.slowed(0.05):
        asked = serving.in_background(lambda: serving.generate([1, 2], params=LONG).json())
        until(lambda: serving.engine.num_unfinished)
        serving.server.should_exit = True
        (choice,) = asked.result()["choices"]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 400
    assert serving.server.exit_code == 0


def test_body_that_never_ends_does_not_hold_the_server(checkpoint: Path, monkeypatch):
    monkeypatch.setattr("keepmask.server.lifecycle._LAST_WORDS_S", 0.3)
    with Serving(checkpoint, drain_timeout_s=0.3) as serving:
        head = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", serving.port)) as connection:
            connection.sendall(head + b"Content-Length: 1000\r\n\r\n{")
            until(lambda: serving.server.server_state.tasks)
            began_s = time.monotonic()
            serving.server.should_exit = True
            until(lambda: not serving.running(), timeout_s=20)
            assert time.monotonic() - began_s < 10
    assert serving.server.exit_code == 1
