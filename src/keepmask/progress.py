"""`Progress`: a progress bar for long commands."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

__all__ = ["Progress"]


class Progress:
    """Items done out of all, and tokens/s, on standard error; silent where that is not a terminal."""

    def __init__(self, total: int, *, label: str = "Rolling out", done: int = 0) -> None:
        console = Console(stderr=True)
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.done = done
        self._task = self._bars.add_task(label, total=total, completed=done, speed="")
        self._started_s = time.perf_counter()

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, done: int, num_tokens: int | None = None, *, label: str | None = None) -> None:
        """Items done, tokens generated since the bar appeared where there are any, and what is being done."""
        self.done = done
        if label is not None:
            self._bars.update(self._task, description=label)
        speed = "" if num_tokens is None else f"{num_tokens / (time.perf_counter() - self._started_s):,.0f} tokens/s"
        self._bars.update(self._task, completed=done, speed=speed)
