"""`Turns`: a lock that is handed on in the order in which threads asked for it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Self

__all__ = ["Turns"]


class Turns:
    """`with turns:` runs by itself; whoever waits longest is next.

    A plain lock goes to any waiter, mostly to the thread that has just released it: one that steps an engine in a loop
    would keep all others from adding their requests. Not reentrant.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False

    def __enter__(self) -> Self:
        with self._lock:
            if not self._taken:
                self._taken = True
                return self
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()
        except BaseException:  # an interrupt, while waiting or just after the turn came
            with self._lock:
                came = gate not in self._waiting
                if not came:
                    self._waiting.remove(gate)
            if came:
                self._hand_on()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hand_on()

    def _hand_on(self) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
