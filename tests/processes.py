"""Processes that tests start. They are forked from one that has imported the library, so they start in milliseconds."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["safer_tta.cli", "safer_tta.bench.study", "safer_tta.demo", "safer_tta.serve.server", "torch._dynamo", "uvicorn"]
)


@contextlib.contextmanager
def running(function: Callable[..., object], *arguments: Any) -> Iterator[ForkServerProcess]:
    """A process that calls a function; at the end of the block it is killed if it still runs."""
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def call(function: Callable[..., object], *arguments: Any) -> int:
    """Call a function in a process and return its exit code."""
    with running(function, *arguments) as process:
        process.join()
        code = process.exitcode
    assert code is not None
    return code


def run_safer(arguments: list[str], output: Path, errors: Path, cwd: Path | None, env: Mapping[str, str]) -> None:
    """Be the command `safer`, whose output goes to files."""
    from safer_tta.cli import main

    for stream, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    # Tests that run in the background of a shell inherit that Ctrl-C is ignored; a user's terminal does not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(env)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(cwd or ".")
    sys.argv = ["safer", *arguments]
    main()


def safer(*arguments: object, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `safer` and return what it printed and its exit code."""
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        code = call(run_safer, words, output, errors, cwd, env)
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


def good(*arguments: object, **options: Any) -> Any:
    """Run `safer` with --json and return its result."""
    result = safer(*arguments, "--json", **options)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run another Python and return what it printed and its exit code."""
    command, environment = [sys.executable, *arguments], {**os.environ, **env}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def gate(connection: Connection) -> Callable[..., None]:
    """Return a tick that reports how far work is, and waits until it may continue."""

    def tick(done: int, total: int, **figures: float) -> None:
        connection.send(done)
        connection.recv()

    return tick


def kill_and_finish(work: Callable[..., object], *arguments: Any, moments: Sequence[int]) -> list[int]:
    """Kill work soon after each of these moments, then let it end; return what every process reported first.

    The work is a function of the arguments and of a connection, which it gives to `gate`.
    """
    first = []
    for moment in (*moments, sys.maxsize):
        here, there = CONTEXT.Pipe()
        with running(work, *arguments, there) as process:
            there.close()
            reports = [here.recv()]
            with contextlib.suppress(EOFError):  # it has ended
                while reports[-1] < moment:
                    here.send(None)
                    reports.append(here.recv())
            if moment < sys.maxsize:
                here.send(None)  # it continues, and dies wherever it is
                process.kill()
            process.join()
            assert process.exitcode == (0 if moment == sys.maxsize else -signal.SIGKILL)
        first.append(reports[0])
    return first
