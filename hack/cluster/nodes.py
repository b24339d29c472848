"""A node: containerd, kubelet, kube-proxy and kube-router's firewall, in one network namespace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hack.cluster import certificates, layout, processes
from hack.cluster.certificates import certificate, key
from hack.cluster.images import base, template
from hack.cluster.images.containerd import UNUSED_PLUGINS
from hack.programs.binaries import program

CNI_PLUGINS = Path("/usr/lib/cni")
LABELS = {1: "learners", 2: "actors"}
"""Values of the label rlightning.io/node-pool; a third node and more are `actors` as well."""


def start_containerd(number: int) -> None:
    """Give a node its images and start its containerd."""
    folder = layout.node_state(number)
    containerd = folder / "containerd"
    template.copy_to(containerd)
    cni = folder / "cni"
    cni.mkdir()
    (cni / "10-bridge.conflist").write_text(json.dumps(_cni(number), indent=1))
    configuration = folder / "containerd.toml"
    configuration.write_text(_containerd_configuration(number))
    processes.start(
        f"containerd-{number}", ["containerd", "--config", configuration], namespace=layout.namespace(number)
    )


def wait_for_containerd(number: int) -> None:
    socket = layout.containerd_socket(number)
    processes.wait_for(
        f"containerd of {layout.node_name(number)} to answer on {socket}",
        socket.is_socket,
        60,
        [f"containerd-{number}"],
    )


def start(number: int) -> None:
    """Start kubelet and kube-proxy; the API server is ready."""
    name, network = layout.node_name(number), layout.namespace(number)
    certificates.make(
        name, f"/O=system:nodes/CN=system:node:{name}", [f"DNS:{name}", f"IP:{layout.node_address(number)}"]
    )
    kubeconfig = certificates.write_kubeconfig(name)
    configuration = layout.node_state(number) / "kubelet.json"
    configuration.write_text(json.dumps(_kubelet_configuration(number), indent=1))
    processes.start(
        f"kubelet-{number}",
        [
            program("kubelet"),
            f"--config={configuration}",
            f"--kubeconfig={kubeconfig}",
            f"--hostname-override={name}",
            f"--node-ip={layout.node_address(number)}",
            f"--root-dir={layout.node_state(number) / 'kubelet'}",
            f"--cert-dir={layout.node_state(number) / 'kubelet-pki'}",
            f"--node-labels=rlightning.io/node-pool={LABELS.get(number, 'actors')}",
        ],
        network,
    )
    processes.start(
        f"kube-proxy-{number}",
        [
            program("kube-proxy"),
            f"--kubeconfig={layout.state() / 'proxy.kubeconfig'}",
            "--proxy-mode=iptables",
            f"--hostname-override={name}",
            f"--cluster-cidr={layout.POD_NETWORK}",
            # The machine's own limits stay as they are.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ],
        network,
    )


def start_firewall(number: int) -> None:
    """Start what enforces NetworkPolicies. It ends at once where its node is not registered yet."""
    processes.start(
        f"kube-router-{number}",
        [
            program("kube-router"),
            "--run-router=false",
            "--run-service-proxy=false",
            "--run-loadbalancer=false",
            "--run-firewall=true",
            f"--kubeconfig={layout.kubeconfig()}",
            f"--hostname-override={layout.node_name(number)}",
            f"--service-cluster-ip-range={layout.SERVICE_NETWORK}",
            "--health-port=0",
        ],
        namespace=layout.namespace(number),
    )


def programs(number: int) -> list[str]:
    """Names of the programs without which a node does not become Ready."""
    return [f"containerd-{number}", f"kubelet-{number}", f"kube-proxy-{number}"]


def _containerd_configuration(number: int) -> str:
    folder = layout.node_state(number)
    socket = layout.containerd_socket(number)
    return f"""version = 2
root = "{folder / "containerd"}"
state = "{folder / "run"}"
disabled_plugins = {json.dumps(UNUSED_PLUGINS)}
[grpc]
  address = "{socket}"
[ttrpc]
  address = "{socket}.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{base.PAUSE}"
  netns_mounts_under_state_dir = true
  restrict_oom_score_adj = true  # without CAP_SYS_RESOURCE a sandbox cannot lower its score, and runc dies
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PLUGINS}"
    conf_dir = "{folder / "cni"}"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      Root = "{folder / "runc"}"
"""


def _cni(number: int) -> dict[str, Any]:
    ranges = [[{"subnet": layout.node_pods(number)}]]
    addresses = {
        "type": "host-local",
        "dataDir": str(layout.node_state(number) / "addresses"),
        "ranges": ranges,
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": False, "hairpinMode": True}
    return {
        "cniVersion": "0.4.0",
        "name": f"{layout.NAME}-{number}",
        "plugins": [{**bridge, "ipam": addresses}, {"type": "portmap", "capabilities": {"portMappings": True}}],
    }


def _kubelet_configuration(number: int) -> dict[str, Any]:
    folder = layout.node_state(number)
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": False}, "x509": {"clientCAFile": str(certificate("ca"))}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{layout.NAME}-{number}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [layout.DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "resolvConf": "",  # the machine's own search domains are not the pods'
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket(number)}",
        # The disk and memory are the machine's, which is also used for other things.
        "evictionHard": {"nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "100Mi"},
        "imageGCHighThresholdPercent": 100,  # an image that is removed could not be pulled again
        "maxPods": 110,
        "serializeImagePulls": False,
        "podLogsDir": str(folder / "pod-logs"),
        "volumePluginDir": str(folder / "volume-plugins"),
        "tlsCertFile": str(certificate(layout.node_name(number))),
        "tlsPrivateKeyFile": str(key(layout.node_name(number))),
    }
