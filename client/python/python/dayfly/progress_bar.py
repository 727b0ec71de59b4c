"""Shows the progress of a stage-in."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Show = Callable[[dict[str, Any]], None]

_LINE_INTERVAL = 5.0
"""Without tqdm, a line is printed this often, in seconds."""


@contextlib.contextmanager
def shown(progress: bool | Show, target: str) -> Iterator[Show]:
    """Gives a function that shows an event of a stage-in: as a bar, as lines, by the caller's function, or not at all."""
    if callable(progress):
        yield progress
    elif not isinstance(progress, bool):
        raise TypeError(f"progress must be True, False or a function, not {type(progress).__name__}")
    elif not progress:
        yield lambda event: None
    else:
        try:
            from tqdm.auto import tqdm
        except ImportError:
            yield _Lines(target).show
            return
        with tqdm(desc=target, unit="B", unit_scale=True, unit_divisor=1024) as bar:

            def show(event: dict[str, Any]) -> None:
                if event["event"] == "planned":
                    bar.total = event["source_bytes"]
                elif event["event"] == "progress":
                    bar.set_postfix_str(f"{event['phase']}, {event['files']} files", refresh=False)
                    bar.update(event["source_bytes"] - bar.n)
                elif event["event"] == "staged-in":
                    bar.set_postfix_str(f"{event['samples']} samples")
                    bar.total = event["source_bytes"]
                    bar.update(event["source_bytes"] - bar.n)

            yield show


class _Lines:
    """Prints lines to standard error."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._total = 0
        self._last = time.monotonic()

    def show(self, event: dict[str, Any]) -> None:
        if event["event"] == "planned":
            self._total = event["source_bytes"]
        elif event["event"] == "progress" and time.monotonic() - self._last >= _LINE_INTERVAL:
            self._last = time.monotonic()
            percent = 100 * event["source_bytes"] // max(self._total, 1)
            self._print(f"{event['phase']}, {percent} % of the sources, {event['files']} files")
        elif event["event"] == "staged-in":
            self._print(f"{event['samples']} samples, {event['bytes']} bytes")

    def _print(self, text: str) -> None:
        print(f"{self._target}: {text}", file=sys.stderr)
