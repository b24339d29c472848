"""The ``rlightning`` command in a process of its own, without paying for torch's import each time.

The processes are forked from a server that has imported everything and done nothing else (multiprocessing's
``forkserver``): same code, same signals and exit codes as a fresh interpreter, seconds less.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["rlightning.cli.run", "rlightning.runtime.driver", "tensordict", "torch._dynamo"])


@dataclass(frozen=True)
class Completed:
    """A finished command.

    Attributes:
        returncode: as of :class:`subprocess.CompletedProcess`: negative if a signal ended it.
        output: stdout and stderr together.
    """

    returncode: int
    output: str


def rlightning(
    *arguments: str | Path, seconds: float = 120, cwd: Path = ROOT, environment: dict[str, str] | None = None
) -> Completed:
    """Run ``rlightning ARGUMENTS…`` to its end."""
    with tempfile.TemporaryFile() as output:
        process = _context.Process(
            target=_main, args=([str(a) for a in arguments], str(cwd), environment or {}, _Descriptor(output.fileno()))
        )
        process.start()
        process.join(seconds)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
        output.seek(0)
        text = output.read().decode()
    assert not late, f"rlightning {' '.join(map(str, arguments))} took more than {seconds:g} s\n{text}"
    assert process.exitcode is not None
    return Completed(process.exitcode, text)


class _Descriptor:
    """A file descriptor on its way to the child."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[object, ...]:
        from multiprocessing.reduction import DupFd

        return _detached, (DupFd(self.number),)


def _detached(duplicate: object) -> _Descriptor:
    return _Descriptor(duplicate.detach())  # type: ignore[attr-defined]


def _main(arguments: list[str], cwd: str, environment: dict[str, str], output: _Descriptor) -> None:
    os.chdir(cwd)
    os.environ.update(environment)
    for number in (1, 2):
        os.dup2(output.number, number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", closefd=False) for n in (1, 2))
    sys.argv = ["rlightning", *arguments]
    from rlightning.cli.app import main

    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
