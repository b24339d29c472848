"""``rlightning validate``: the API server's verdict, without one."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Literal

from rlightning.api.validate import errors, validate_sources
from rlightning.cli.display import ascii_only, printable
from rlightning.errors import ManifestError


def validate_files(files: Sequence[str], output: Literal["text", "json"]) -> int:
    """Check all files; returns the exit status."""
    if files.count("-") > 1:
        raise ManifestError("standard input (-) can be read once")
    by_file = {file: validate_sources([file]) for file in dict.fromkeys(files)}
    problems = [problem for found in by_file.values() for problem in found]
    invalid = len(errors(problems))
    if output == "json":
        print(
            json.dumps(
                {
                    "valid": not invalid,
                    "files": [{"file": file, "valid": not errors(found)} for file, found in by_file.items()],
                    "problems": [dataclasses.asdict(problem) for problem in problems],
                },
                indent=2,
                ensure_ascii=ascii_only(sys.stdout),
            )
        )
        return 1 if invalid else 0
    for file, found in by_file.items():
        for problem in found:
            print(printable(str(problem), sys.stdout))
        if not errors(found):
            print(f"{file}: valid")
    if invalid:
        print(f"{invalid} {'problem' if invalid == 1 else 'problems'}")
    return 1 if invalid else 0
