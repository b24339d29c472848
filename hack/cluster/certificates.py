"""The cluster's certificates and kubeconfigs, made by openssl with a certificate authority that lives as long as it."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from hack.cluster import layout
from hack.cluster.processes import run

DAYS = "365"


def make_authority() -> None:
    """The authority, the key that signs service accounts' tokens, and the API server's certificate."""
    folder = _folder()
    folder.mkdir(parents=True, mode=0o700)
    # openssl's own settings would make every certificate one of an authority.
    (folder / "openssl.cnf").write_text("[req]\ndistinguished_name = none\n[none]\n")
    _request(
        "ca",
        f"/CN={layout.NAME}-ca",
        "-addext",
        "basicConstraints=critical,CA:TRUE",
        "-addext",
        "keyUsage=critical,keyCertSign,cRLSign,digitalSignature",
    )
    run("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key("sa"))
    run("openssl", "ec", "-in", key("sa"), "-pubout", "-out", folder / "sa.pub")
    make(
        "apiserver",
        "/CN=kube-apiserver",
        [
            *("DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc"),
            *("DNS:kubernetes.default.svc.cluster.local", "DNS:localhost"),
            *("IP:127.0.0.1", f"IP:{layout.KUBERNETES_SERVICE}", f"IP:{layout.API_ADDRESS}"),
        ],
    )


def make(name: str, subject: str, alternatives: Sequence[str] = ()) -> None:
    """A certificate for a client and server; the subject's CN is the user, its O the group."""
    names = ",".join(alternatives) or f"DNS:{name}"
    _request(
        name,
        subject,
        *("-CA", str(certificate("ca")), "-CAkey", str(key("ca"))),
        *("-addext", f"subjectAltName={names}", "-addext", "extendedKeyUsage=clientAuth,serverAuth"),
        *("-addext", "basicConstraints=critical,CA:FALSE", "-addext", "keyUsage=critical,digitalSignature"),
    )


def make_user(name: str, subject: str) -> Path:
    """A certificate with a kubeconfig, whose path is returned."""
    make(name, subject)
    return write_kubeconfig(name)


def write_kubeconfig(name: str) -> Path:
    """The kubeconfig of a user whose certificate exists."""
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": layout.NAME,
                "cluster": {"server": layout.API, "certificate-authority-data": _text(certificate("ca"))},
            }
        ],
        "users": [
            {
                "name": name,
                "user": {"client-certificate-data": _text(certificate(name)), "client-key-data": _text(key(name))},
            }
        ],
        "contexts": [{"name": layout.NAME, "context": {"cluster": layout.NAME, "user": name}}],
        "current-context": layout.NAME,
    }
    path = layout.state() / f"{name}.kubeconfig"
    path.touch(mode=0o600)
    path.write_text(json.dumps(content, indent=1))  # JSON is YAML
    return path


def certificate(name: str) -> Path:
    return _folder() / f"{name}.crt"


def key(name: str) -> Path:
    return _folder() / f"{name}.key"


def _folder() -> Path:
    return layout.state() / "pki"


def _text(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _request(name: str, subject: str, *more: str) -> None:
    run(
        *("openssl", "req", "-x509", "-config", _folder() / "openssl.cnf", "-subj", subject, "-days", DAYS),
        *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", key(name), "-out", certificate(name)),
        *more,
    )
