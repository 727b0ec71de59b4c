"""Starts, uses and ends sessions by means of the program `dayfly`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .progress_bar import Show, shown

if TYPE_CHECKING:
    from ._dayfly import Session

_VARIABLE = "DAYFLY_SESSION"
_WRONG_USAGE = 2
_LEFT_OUT = 3
_INTERRUPT_TIMEOUT = 30
"""How long, in seconds, an interrupted program may take to end."""


def session(*, local: int | None = None, start: bool | None = None, **options: Any) -> RunningSession:
    """Starts a session, or finds the one that runs.

    With options, starts a session as `dayfly up` does: `session(local=4, data_dir="/local")` stands for
    `dayfly up --local 4 --data-dir /local`. The session ends with the `with` block, or with the process, also if
    a signal kills it. With `keep`, which lets a session outlive its job, a killed process leaves it running.

    Without options, finds the session that `dayfly` commands would use: the one that `DAYFLY_SESSION`
    names, else this job's, else the only one on this machine. Such a session goes on. To start a session
    without options, for example in a job of Slurm, use `start=True`.

    # Errors

    `dayfly.Error` with the program's message.
    """
    options = {"local": local, **options}
    if start is None:
        start = any(value is not None for value in options.values())
    if not start:
        if any(value is not None for value in options.values()):
            raise ValueError("start=False cannot be combined with options, which are for a new session")
        exports = _run(["env"]).splitlines()
        found = [line.partition("=")[2] for line in exports if line.startswith(f"export {_VARIABLE}=")]
        return RunningSession(found[0].strip("'\""), is_own=False)
    if options.get("keep") is None:
        options.setdefault("end_with", os.getpid())
    return RunningSession(_run(["up", *_flags(options)]).strip(), is_own=True)


_OWN: set[RunningSession] = set()
"""Sessions that this process has started and not ended. A session does not end because the program no longer uses its object."""


class RunningSession:
    """A session that runs. While it is open, `DAYFLY_SESSION` names it, so that this process and its
    children find it."""

    def __init__(self, id: str, is_own: bool) -> None:
        self.id = id
        """The session's id, as `dayfly up` prints it."""
        self.is_own = is_own
        """Whether this object has started the session, and so ends it."""
        self._end = weakref.finalize(self, _end, id, is_own, os.environ.get(_VARIABLE), os.getpid())
        os.environ[_VARIABLE] = id
        if is_own:
            _OWN.add(self)

    def stage_in(
        self,
        sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        target: str | os.PathLike[str],
        *,
        progress: bool | Show = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Stages sources (archives, directories, files, patterns) in as the dataset `target`.

        The options are those of `dayfly stage-in`: `stage_in("*.tar", "/dayfly/train", copies=2,
        keep_going=True)` stands for `dayfly stage-in --copies 2 --keep-going '*.tar' /dayfly/train`.

        `progress=True` shows a bar if tqdm is installed, and lines on standard error otherwise. A
        function gets each event as a dictionary, as `dayfly stage-in --json` prints it.

        Returns the summary, which has among others `samples` and `bytes`.

        # Errors

        `dayfly.Error` with the program's message.
        """
        listed = [sources] if isinstance(sources, (str, os.PathLike)) else sources
        named = [os.fspath(source) for source in listed]
        if not named:
            raise ValueError("sources must name at least one archive, directory or file")
        line = ["stage-in", "--json", *_flags(options), "--", *named, os.fspath(target)]
        summary: dict[str, Any] = {}
        with shown(progress, os.fspath(target)) as show:
            for event in _events(line, self._environment()):
                show(event)
                if event["event"] == "staged-in":
                    summary = event
        return summary

    def attach(self, node: int | None = None) -> Session:
        """Attaches this process to the session: to the given node, or to the lowest one on this machine."""
        from ._dayfly import attach

        return attach(self.id, node)

    def end(self) -> None:
        """Ends the session if this object has started it. Ending it twice does nothing."""
        self._end()
        _OWN.discard(self)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, _VARIABLE: self.id}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def __repr__(self) -> str:
        return f"<session {self.id}{'' if self._end.alive else ' (ended)' if self.is_own else ' (left)'}>"


def _end(id: str, is_own: bool, before: str | None, process: int) -> None:
    """Restores the environment, and ends an own session. Forked children leave their parent's session alone."""
    if os.getpid() != process:
        return
    if before is not None:
        os.environ[_VARIABLE] = before
    else:
        os.environ.pop(_VARIABLE, None)
    if is_own:
        _run(["down"], {**os.environ, _VARIABLE: id})


def _program() -> str:
    """Returns the path of the program: the one that `DAYFLY_PROGRAM` names, or else the one of this package, or else the one
    in `PATH`."""
    named = os.environ.get("DAYFLY_PROGRAM")
    if named:
        return named
    for scheme in (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user")):
        path = os.path.join(sysconfig.get_path("scripts", scheme), "dayfly")
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("dayfly")
    if found is None:
        raise _error("the program 'dayfly' is neither beside this package nor in PATH; add its folder to PATH")
    return found


def _flags(options: dict[str, Any]) -> list[str]:
    """Returns options of a command line: `keep_going=True` becomes `--keep-going`."""
    flags: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        values = [value] if isinstance(value, (str, os.PathLike)) or not isinstance(value, Sequence) else value
        for one in values:
            if one is True:
                flags.append(flag)
            elif isinstance(one, (str, os.PathLike, int, float)) and one is not False:
                flags.append(f"{flag}={os.fspath(one) if isinstance(one, os.PathLike) else one}")
            elif one is not None and one is not False:
                raise TypeError(f"{name} must be a text, a path, a number, True or a list of these, not {type(one).__name__}")
    return flags


def _run(line: list[str], environment: dict[str, str] | None = None) -> str:
    """Runs a command, and returns what it prints."""
    nothing = subprocess.DEVNULL
    done = subprocess.run([_program(), *line], env=environment, text=True, capture_output=True, stdin=nothing, check=False)
    _check(done.returncode, done.stderr)
    return done.stdout


def _events(line: list[str], environment: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Runs a command that prints lines of JSON, and yields each as it comes. If the caller stops, the command is interrupted."""
    with tempfile.TemporaryFile("w+") as errors:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [_program(), *line], env=environment, text=True, stdin=subprocess.DEVNULL, stdout=pipe, stderr=errors
        )
        try:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
            process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_INTERRUPT_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            raise
        finally:
            process.stdout.close()  # type: ignore[union-attr]
        errors.seek(0)
        _check(process.returncode, errors.read())


def _check(status: int, errors: str) -> None:
    """Raises the program's message as an exception if the program failed. Otherwise passes on its remarks."""
    if status in (0, _LEFT_OUT):
        sys.stderr.write(errors)
        return
    message = errors.strip().removeprefix("dayfly: ") or f"the program 'dayfly' ended with status {status}"
    if status == _WRONG_USAGE:
        raise ValueError(message)
    raise _error(message)


def _error(message: str) -> Exception:
    from ._dayfly import Error

    return Error(message)
