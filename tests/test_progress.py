"""The progress bar, on a terminal and off it."""

import io

from rich.console import Console

import keepmask.progress
from keepmask.progress import Progress


def shown(monkeypatch, *, terminal):
    stream = io.StringIO()
    monkeypatch.setattr(
        keepmask.progress, "Console", lambda **_: Console(file=stream, force_terminal=terminal, width=100)
    )
    with Progress(4, label="Asking", done=1) as progress:
        progress.update(2, label="Asking about ties")
        progress.update(3, 100)
        assert progress.done == 3
    return stream.getvalue()


def test_it_says_how_far_what_is_done_is_and_what_is_being_done(monkeypatch):
    text = shown(monkeypatch, terminal=True)
    assert "Asking about ties" in text
    assert "3/4" in text
    assert "tokens/s" in text


def test_off_a_terminal_it_is_silent(monkeypatch):
    assert shown(monkeypatch, terminal=False).strip() == ""
