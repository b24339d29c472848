"""What `helm test` runs in a pod: are the CRDs there and do they validate, and does the status service let us in.

Arguments: namespace, the status service's URL or nothing, and the file of the token for it if it takes other ones than
the API server. Needs nothing but Python.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API = "https://kubernetes.default.svc/apis/rlightning.io/v1alpha1"
SAMPLE = {
    "apiVersion": "rlightning.io/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "helm-test"},
    "spec": {
        "environment": {"id": "CartPole-v1", "numEnvs": 8},
        "policy": {"simplePPO": {}},
        "training": {"totalEnvSteps": 1000},
    },
}


def ask(url: str, context: ssl.SSLContext, token: Path, body: object = None) -> tuple[int, dict[str, object]]:
    """Status code and JSON of an answer, with a token of ours; tries again for a while where nobody answers."""
    headers = {"Authorization": f"Bearer {token.read_text()}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    for pause in (1, 2, 4, 8, 0):
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=10, context=context) as got:
                return got.status, json.load(got)
        except urllib.error.HTTPError as error:
            if error.code < 500 or not pause:
                return error.code, json.load(error)
        except OSError as error:
            if not pause:
                sys.exit(f"{url} cannot be reached: {error}")
            print(f"{url}: {error}; trying again", flush=True)
        time.sleep(pause)
    raise AssertionError


def expect(what: str, code: int, answer: tuple[int, dict[str, object]]) -> None:
    """Print the outcome of one check; end with 1 when it failed."""
    got, body = answer
    if got != code:
        sys.exit(f"FAILED {what}: {got}, not {code}: {body.get('detail') or body.get('message') or body}")
    print(f"ok     {what}", flush=True)


def main() -> None:
    """All checks."""
    namespace, status = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    token = ACCOUNT / "token"
    status_token = Path(sys.argv[3]) if len(sys.argv) > 3 else token
    cluster = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    code, served = ask(API, cluster, token)
    expect("the API server serves rlightning.io/v1alpha1", 200, (code, served))
    kinds = {resource["kind"] for resource in served["resources"]}  # type: ignore[attr-defined]
    if not {"RLJob", "PolicyGroup"} <= kinds:
        sys.exit(f"FAILED the CustomResourceDefinitions are incomplete: {sorted(kinds)}")
    dry_run = f"{API}/namespaces/{namespace}/rljobs?dryRun=All&fieldValidation=Strict"
    expect("an RLJob would be accepted", 201, ask(dry_run, cluster, token, SAMPLE))
    nonsense = {**SAMPLE, "spec": {**SAMPLE["spec"], "training": {"totalEnvSteps": 0}}}  # type: ignore[dict-item]
    expect("an RLJob that makes no sense is refused", 422, ask(dry_run, cluster, token, nonsense))
    if status:
        # The certificate, if there is one, is the administrator's and made for other names.
        loose = ssl.create_default_context()
        loose.check_hostname, loose.verify_mode = False, ssl.CERT_NONE
        rljobs = f"{status}/v1/namespaces/{namespace}/rljobs"
        expect("the status service is ready", 200, ask(f"{status}/readyz", loose, status_token))
        expect("it lists RLJobs", 200, ask(f"{rljobs}?limit=1", loose, status_token))
        expect("it refuses what we may not", 403, ask(f"{rljobs}/x/members", loose, status_token))


if __name__ == "__main__":
    main()
