"""What the operator is told: flags, each with an environment variable for the chart."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlightning_operator.reconcile.snapshot import OperatorConfig

PREFIX = "RLIGHTNING_"


@dataclass(frozen=True)
class Settings:
    """How the process runs; ``jobs`` is what the jobs are built with.

    Attributes:
        namespaces: None for all.
        detect_endpoints: ask the API server for its own addresses, since none were given and policies need them.
        startup_seconds: how long to wait at the start for the API server and the CRDs.
    """

    jobs: OperatorConfig
    namespaces: tuple[str, ...] | None = None
    detect_endpoints: bool = False
    host: str = "0.0.0.0"
    port: int = 8080
    workers: int = 4
    startup_seconds: float = 60.0
    log_level: str = "info"
    log_format: str = "text"


def parse(arguments: Sequence[str] | None = None, environment: Mapping[str, str] = os.environ) -> Settings:
    """Read the command line; wrong values end the process with a sentence, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="rlightning-operator",
        description="Runs RLJobs on Kubernetes with KubeRay.",
        epilog=f"Each option can be given as an environment variable too: --log-level as {PREFIX}LOG_LEVEL, and so on.",
    )

    def option(name: str, default: str, text: str, **more: object) -> None:
        variable = PREFIX + name.removeprefix("--").replace("-", "_").upper()
        shown = f" (default: {default})" if default else ""
        # A string as default goes through `type` and, unlike one from the command line, not through `choices`.
        parser.add_argument(name, default=environment.get(variable, default), help=text + shown, **more)  # type: ignore[arg-type]

    defaults = OperatorConfig()
    option("--namespaces", "", "namespaces to watch, separated by commas; all if none are named", type=_words)
    option("--trainer-image", defaults.trainer_image, "image of jobs that name none", type=_image)
    option("--image-pull-policy", defaults.image_pull_policy, "Always, IfNotPresent or Never", type=_pull_policy)
    option("--ray-version", defaults.ray_version, "Ray's version in the trainer image", type=_version)
    option("--network-policies", "true", "make NetworkPolicies for each job: true or false", type=_truth)
    option(
        "--api-server-endpoints",
        "",
        "IP:PORT,… at which the API server really listens, for the jobs' NetworkPolicies; asked from it if left out",
        type=_endpoints,
    )
    option("--scrape-namespaces", "", "namespaces whose pods may read the metrics of a job's Ray pods", type=_words)
    option("--workers", "4", "jobs that are looked at at the same time", type=_count)
    option("--host", "0.0.0.0", "address to serve health and metrics at")
    option("--port", "8080", "port of /healthz, /readyz and /metrics", type=_port)
    option("--startup-seconds", "60", "how long to wait at the start for the API server and the CRDs", type=float)
    option("--log-level", "info", "debug, info, warning or error", type=_level)
    option("--log-format", "text", "text or json", type=_format)
    given = parser.parse_args(arguments)
    jobs = OperatorConfig(
        trainer_image=given.trainer_image,
        image_pull_policy=given.image_pull_policy,
        ray_version=given.ray_version,
        network_policies=given.network_policies,
        api_server_endpoints=given.api_server_endpoints,
        scrape_namespaces=given.scrape_namespaces,
    )
    return Settings(
        jobs=jobs,
        namespaces=given.namespaces or None,
        detect_endpoints=given.network_policies and not given.api_server_endpoints,
        host=given.host,
        port=given.port,
        workers=given.workers,
        startup_seconds=given.startup_seconds,
        log_level=given.log_level,
        log_format=given.log_format,
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _one_of(text: str, *choices: str) -> str:
    if text not in choices:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
    return text


def _image(text: str) -> str:
    if not re.fullmatch(r"\S{1,512}", text):  # status.image
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of an image")
    return text


def _version(text: str) -> str:
    if not re.fullmatch(r"[0-9]\S{0,62}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a version of Ray, as in 2.60.0")
    return text


def _pull_policy(text: str) -> str:
    return _one_of(text, "Always", "IfNotPresent", "Never")


def _level(text: str) -> str:
    return _one_of(text.lower(), "debug", "info", "warning", "error")


def _format(text: str) -> str:
    return _one_of(text, "text", "json")


def _truth(text: str) -> bool:
    return _one_of(text.lower(), "true", "false") == "true"


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 256")
    return int(text)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


def _endpoints(text: str) -> tuple[tuple[str, int], ...]:
    endpoints = []
    for word in _words(text):
        host, _, port = word.rpartition(":")
        try:
            endpoints.append((str(ipaddress.ip_address(host.strip("[]"))), int(port)))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{word!r} is not IP:PORT, as in 10.0.0.7:6443") from None
    return tuple(endpoints)
