"""The command: ``python -m hack.cluster up | down | status | …``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hack import cluster
from hack.cluster import layout
from hack.cluster.layout import ClusterError
from hack.programs.binaries import BuildError, program


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.action(options)
    except (ClusterError, BuildError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("cluster: interrupted; `python -m hack.cluster down` removes what is there", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hack.cluster", description=cluster.__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="boot it, or bring it up to date with the code; prints its KUBECONFIG")
    up.add_argument("--nodes", type=int, default=layout.NODES)
    up.add_argument("--no-images", action="store_true", help="do not build the project's images")
    up.add_argument("--no-policies", action="store_true", help="do not enforce NetworkPolicies")
    up.add_argument("--no-kuberay", action="store_true", help="without KubeRay (`kuberay` brings it later)")
    up.set_defaults(action=_up)

    down = commands.add_parser(
        "down", help="take it down, volumes with run folders included; only caches and the last logs stay"
    )
    down.set_defaults(action=lambda _: cluster.down())

    status = commands.add_parser("status", help="say what is up")
    status.set_defaults(action=lambda _: print(cluster.status()))

    images = commands.add_parser("images", help="build and import the images that changed, without booting")
    images.set_defaults(action=_images)

    check = commands.add_parser("check", help="say whether this machine can have a cluster, and if not why")
    check.set_defaults(action=lambda _: cluster.check())

    kubeconfig = commands.add_parser("kubeconfig", help="print the path of its kubeconfig")
    kubeconfig.set_defaults(action=lambda _: print(_running().kubeconfig))

    claim = commands.add_parser("claim", help="print the folder behind a bound PersistentVolumeClaim")
    claim.add_argument("namespace")
    claim.add_argument("name")
    claim.set_defaults(action=lambda options: print(_running().claim_directory(options.namespace, options.name)))

    load = commands.add_parser("load", help="import an image archive into every node of the running cluster")
    load.add_argument("archive", type=Path)
    load.set_defaults(action=lambda options: _running().load(options.archive))

    gpus = commands.add_parser("gpus", help="let a node offer nvidia.com/gpu (only the scheduler counts them)")
    gpus.add_argument("node")
    gpus.add_argument("number", type=int)
    gpus.set_defaults(action=lambda options: _running().gpus(options.node, options.number))

    kuberay = commands.add_parser("kuberay", help="install KubeRay's CRDs and start its operator, or stop it")
    kuberay.add_argument("what", nargs="?", choices=["start", "stop", "remove"], default="start")
    kuberay.set_defaults(action=_kuberay)

    kubectl = commands.add_parser("kubectl", help="run kubectl on it")
    kubectl.add_argument("arguments", nargs=argparse.REMAINDER)
    kubectl.set_defaults(action=lambda options: print(_running().kubectl(*options.arguments), end=""))
    return parser


def _up(options: argparse.Namespace) -> None:
    running = cluster.up(
        options.nodes,
        images=not options.no_images,
        policies=not options.no_policies,
        with_kuberay=not options.no_kuberay,
    )
    print(f"export KUBECONFIG={running.kubeconfig}")
    print(f"export PATH={program('kubectl').parent}:{program('helm').parent}:$PATH")


def _images(_: argparse.Namespace) -> None:
    for name, tag in cluster.build_images().items():
        print(f"{name}  {tag.rpartition(':')[2]}")


def _kuberay(options: argparse.Namespace) -> None:
    if options.what == "start":
        _running().start_kuberay()
    else:
        _running().stop_kuberay(crds=options.what == "remove")


def _running() -> cluster.Cluster:
    if not cluster.is_up():
        raise ClusterError("no cluster is up; `python -m hack.cluster up` boots one")
    return cluster.Cluster(layout.kubeconfig())


if __name__ == "__main__":
    sys.exit(main())
