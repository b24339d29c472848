"""`rlightning-status`: the status service as a process."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence

import uvicorn

from rlightning_operator import logs
from rlightning_operator.rest.app import create_app
from rlightning_operator.rest.cluster import Cluster, ConfigurationError, Endpoint
from rlightning_operator.rest.settings import Settings

SHUTDOWN_SECONDS = 15  # for requests under way; below Kubernetes' 30 s, above any request's deadline


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    options = _options(arguments)
    logs.configure(options.log_level, options.log_format)
    try:
        cluster = Cluster(Endpoint.find(), options.api_seconds)
    except ConfigurationError as error:
        logging.getLogger("rlightning.status").error(str(error))
        return 2
    settings = Settings(
        namespaces=options.namespaces,
        audiences=options.audiences,
        cache_seconds=options.cache_seconds,
        api_seconds=options.api_seconds,
        docs=options.docs,
    )
    # uvicorn shuts down by itself on both, and raises the signal again afterwards: the exit status is 0 all the same.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(settings, cluster),
            host=options.host,
            port=options.port,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,  # ours has the request's id and user, and no query
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            ssl_certfile=options.tls_cert_file,
            ssl_keyfile=options.tls_key_file,
        )
    )
    server.run()
    return 0 if server.started else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rlightning-status",
        description="Read-only REST view of RLJobs. The API server is the pod's own, or the one that KUBECONFIG names.",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all IPv4 ones)")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument(
        "--namespaces",
        type=_words,
        default=(),
        help="namespaces that the service's account may read, separated by commas (default: all)",
    )
    parser.add_argument(
        "--audiences",
        type=_words,
        default=(),
        help="take tokens for these audiences only, separated by commas (default: those for the API server itself)",
    )
    parser.add_argument(
        "--cache-seconds", type=float, default=10.0, help="how long answers about tokens and rights are kept"
    )
    parser.add_argument("--api-seconds", type=float, default=5.0, help="deadline of a request to the API server")
    parser.add_argument("--docs", action="store_true", help="serve /docs, which loads its scripts from the internet")
    parser.add_argument("--tls-cert-file", help="serve HTTPS with this certificate chain")
    parser.add_argument("--tls-key-file", help="and its key")
    parser.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info")
    parser.add_argument("--log-format", choices=["text", "json"], default="text")
    return parser.parse_args(arguments)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


if __name__ == "__main__":
    sys.exit(main())
