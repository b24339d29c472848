"""Flags, environment, log lines."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from rlightning_operator import logs
from rlightning_operator.config import parse


def test_flags_win_over_the_environment_which_wins_over_defaults() -> None:
    environment = {"RLIGHTNING_NAMESPACES": "a, b", "RLIGHTNING_TRAINER_IMAGE": "env:1", "RLIGHTNING_PORT": "9000"}
    settings = parse(["--trainer-image", "flag:2"], environment)
    assert settings.namespaces == ("a", "b")
    assert settings.jobs.trainer_image == "flag:2"
    assert (settings.port, settings.workers) == (9000, 4)
    assert parse([], {}).namespaces is None, "all of them"


def test_the_api_servers_addresses_are_asked_for_only_if_policies_need_them() -> None:
    assert parse([], {}).detect_endpoints
    assert not parse(["--network-policies", "false"], {}).detect_endpoints
    given = parse(["--api-server-endpoints", "10.0.0.7:6443,[fd00::1]:443"], {})
    assert not given.detect_endpoints
    assert given.jobs.api_server_endpoints == (("10.0.0.7", 6443), ("fd00::1", 443))


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--api-server-endpoints", "kubernetes:443", "is not IP:PORT, as in 10.0.0.7:6443"),
        ("--workers", "0", "is not a whole number from 1 to 256"),
        ("--network-policies", "maybe", "is none of true, false"),
        ("--image-pull-policy", "Sometimes", "is none of Always, IfNotPresent, Never"),
        ("--trainer-image", "a b", "'a b' is not the name of an image"),
        ("--trainer-image", "", "'' is not the name of an image"),
        ("--ray-version", "newest", "'newest' is not a version of Ray, as in 2.60.0"),
        ("--log-level", "loud", "is none of debug, info, warning, error"),
    ],
)
def test_wrong_values_are_refused_in_words(
    flag: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([flag, value], {})
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse([], {"RLIGHTNING_" + flag[2:].replace("-", "_").upper(): value})


def _record(message: str, level: int = logging.INFO, name: str = "rlightning", **fields: object) -> logging.LogRecord:
    record = logging.LogRecord(name, level, "", 0, message, None, None)
    record.__dict__.update(fields)
    record.created = 1.5
    return record


def test_a_record_is_one_line() -> None:
    record = _record("state Pending ->\n Running", job="team/cartpole", fields={"failures": 2, "user": None})
    assert logs.Lines().format(record) == (
        "1970-01-01T00:00:01.500Z INFO    team/cartpole: state Pending ->  Running failures=2"
    )
    assert json.loads(logs.JsonLines().format(record)) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "info",
        "message": "state Pending ->\n Running",
        "logger": "rlightning",
        "job": "team/cartpole",
        "failures": 2,
    }


def test_kopfs_retries_are_one_line_in_a_while_and_no_errors() -> None:
    few = logs.FewerRetries()
    retries = [_record(f"Request attempt #{n} failed; will retry", logging.ERROR, "kopf.x") for n in range(20)]
    passed = [record for record in retries if few.filter(record)]
    assert len(passed) == 1
    assert passed[0].levelname == "WARNING"
    assert few.filter(_record("something else", logging.ERROR, "kopf.x"))


def test_the_operator_imports_no_training_library() -> None:
    code = (
        "import sys, rlightning_operator.main; print(sorted({'torch', 'ray', 'numpy', 'gymnasium'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
