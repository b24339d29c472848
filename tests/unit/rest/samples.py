"""Stored objects as the API server hands them out."""

from __future__ import annotations

from typing import Any

DIGEST = "xxh3-128:" + "0" * 31
JOB_UID = "11111111-2222-3333-4444-555555555555"


def digest(n: int) -> str:
    return f"{DIGEST}{n:x}"


def job(name: str = "cartpole", namespace: str = "team-a", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "RLJob",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": JOB_UID,
            "resourceVersion": "17",
            "generation": 2,
            "creationTimestamp": "2026-11-29T10:00:00Z",
        },
        "spec": {
            "seed": 7,
            "environment": {"id": "CartPole-v1", "numEnvs": 8},
            "policy": {"simplePPO": {}},
            "training": {"totalEnvSteps": 1000},
            "policyGroup": {"train": {"replicas": 1}, "eval": {"replicas": 4}},
            "suspend": False,
        },
        "status": {
            "observedGeneration": 2,
            "state": "Running",
            "attempt": 1,
            "conditions": [
                {
                    "type": "Progressing",
                    "status": "True",
                    "reason": "Iterating",
                    "message": "iteration 3",
                    "lastTransitionTime": "2026-11-29T10:01:00Z",
                }
            ],
            "progress": {"iteration": 3, "envSteps": 768, "episodeReturnMean": 21.375},
            "weights": {"version": 3, "digest": digest(3), "consistentMembers": "4/4"},
            **status,
        },
    }


def group(name: str = "cartpole", namespace: str = "team-a", uid: str = JOB_UID, **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "rlightning.io/v1alpha1",
        "kind": "PolicyGroup",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": "group-uid",
            "resourceVersion": "18",
            "ownerReferences": [{"apiVersion": "rlightning.io/v1alpha1", "kind": "RLJob", "name": name, "uid": uid}],
        },
        "spec": {},
        "status": {
            "attempt": 1,
            "version": 3,
            "progress": {"iteration": 3, "envSteps": 768, "lastReportTime": "2026-11-29T10:02:00Z"},
            "members": [
                {"name": "train-0", "role": "Train", "state": "Ready", "version": 3, "digest": digest(3)},
                {"name": "eval-0", "role": "Eval", "state": "Ready", "version": 3, "digest": digest(9)},
                {"name": "eval-1", "role": "Eval", "state": "Ready", "version": 1, "digest": digest(1)},
                {"name": "eval-2", "role": "Eval", "state": "Starting"},
            ],
            "versions": [
                {"version": 2, "learnerDigest": digest(2), "verified": 4, "total": 4},
                {"version": 3, "learnerDigest": digest(3), "verified": 4, "total": 4},
            ],
            **status,
        },
    }
