"""What keeps one pod from being Ready, in the words of scheduler, kubelet and container."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlightning_operator.reconcile.objects import (
    condition,
    container_statuses,
    is_deleted,
    is_true,
    name_of,
    sentence,
    shorten,
)
from rlightning_operator.reconcile.snapshot import Object

# From what somebody has to mend to what passes by itself. Of several troubles the first one here is told.
ORDER = ("ImagePull", "PodFailed", "Unschedulable", "NodeLost", "HeadNotReady", "PodsPending", "PodsStarting")

_IMAGE_REASONS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError")
_BROKEN_REASONS = ("CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_WORDS = 1024  # characters of somebody else's message


@dataclass(frozen=True)
class Trouble:
    """Why a pod is not Ready.

    Attributes:
        reason: one of :data:`ORDER`.
        message: a sentence that names the pod.
        pod: it.
        image: of an ImagePull; ``detailed`` says whether the kubelet gave more than that it waits to try again.
    """

    reason: str
    message: str
    pod: Object
    image: str | None = None
    detailed: bool = True

    @property
    def rank(self) -> int:
        return ORDER.index(self.reason)


def trouble(pod: Object, nodes: tuple[Object, ...] | None) -> Trouble | None:
    """None for a pod that is Ready."""
    if is_true(pod, "Ready") and not is_deleted(pod) and not _lost_node(pod, nodes):
        return None
    return (
        _leaving(pod)
        or _ended(pod)
        or _unscheduled(pod)
        or _node(pod, nodes)
        or _container(pod)
        or Trouble("PodsStarting", _starting(pod), pod)
    )


def _leaving(pod: Object) -> Trouble | None:
    if not is_deleted(pod):
        return None
    disruption = condition(pod, "DisruptionTarget")
    why = f" ({disruption.get('reason')}: {disruption.get('message')})" if disruption else ""
    reason = "NodeLost" if disruption and "Taint" in str(disruption.get("reason")) else "PodsPending"
    return Trouble(reason, f"Pod {name_of(pod)} is being deleted{why}.", pod)


def _ended(pod: Object) -> Trouble | None:
    status = pod.get("status") or {}
    if status.get("phase") not in ("Failed", "Succeeded"):
        return None
    words = [str(status[key]) for key in ("reason", "message") if status.get(key)]
    ended = next((e for c in container_statuses(pod) if (e := describe_end(c))), None)
    detail = ": ".join(words) or ended or f"its phase is {status['phase']}"
    return Trouble("PodFailed", sentence(f"Pod {name_of(pod)} has ended: {shorten(detail, _WORDS, keep='end')}"), pod)


def _unscheduled(pod: Object) -> Trouble | None:
    scheduled = condition(pod, "PodScheduled")
    if scheduled is None or scheduled.get("status") == "True":
        return None
    # What preemption would not do is noise: jobs have no priority over others.
    words = re.split(
        r"\s*(?:no new claims to deallocate,\s*)?preemption: ", str(scheduled.get("message") or ""), maxsplit=1
    )[0]
    words = shorten(words, _WORDS) or str(scheduled.get("reason"))
    if scheduled.get("reason") == "Unschedulable":
        return Trouble("Unschedulable", sentence(f"Pod {name_of(pod)} finds no node: {words}"), pod)
    return Trouble("PodsPending", sentence(f"Pod {name_of(pod)} is not to be scheduled yet: {words}"), pod)


def _lost_node(pod: Object, nodes: tuple[Object, ...] | None) -> Mapping[str, Any] | None:
    """The Ready condition of the pod's node, where that is not True."""
    node_name = (pod.get("spec") or {}).get("nodeName")
    node = next((n for n in nodes or () if name_of(n) == node_name), None)
    ready = condition(node, "Ready")
    return ready if ready is not None and ready.get("status") != "True" else None


def _node(pod: Object, nodes: tuple[Object, ...] | None) -> Trouble | None:
    node_name = (pod.get("spec") or {}).get("nodeName")
    lost = _lost_node(pod, nodes)
    if lost is None and (pod.get("status") or {}).get("reason") != "NodeLost":
        return None
    words = str((lost or {}).get("message") or "it is lost")
    return Trouble(
        "NodeLost", sentence(f"Node {node_name} of pod {name_of(pod)} is not Ready: {shorten(words, _WORDS)}"), pod
    )


def _container(pod: Object) -> Trouble | None:
    for status in container_statuses(pod):
        name, waiting = status.get("name"), (status.get("state") or {}).get("waiting") or {}
        reason = waiting.get("reason")
        if reason in _IMAGE_REASONS:
            return _image(pod, status, str(reason), str(waiting.get("message") or ""))
        ended = describe_end(status)
        # While a container that keeps dying runs for a moment, what it died of is still the news.
        if reason in _BROKEN_REASONS or (ended and (status.get("restartCount") or 0) >= 2):
            words = ended if ended and reason in (None, "CrashLoopBackOff") else None
            words = words or f"{reason}: {waiting.get('message') or 'the kubelet says no more'}"
            message = f"Pod {name_of(pod)}, container {name}: {shorten(words, _WORDS, keep='end')}"
            return Trouble("PodFailed", sentence(message), pod)
    return None


def _image(pod: Object, status: Mapping[str, Any], reason: str, message: str) -> Trouble:
    # The kubelet takes turns between "ErrImagePull: why" and "ImagePullBackOff: Back-off pulling image: why". Only
    # the why is told, so that the sentence stands still.
    image = str(status.get("image") or "")
    detail = re.sub(r'^Back-off pulling image "[^"]*"(: )?', "", message)
    detail = re.sub(r"^(ErrImagePull|ImagePullBackOff)(: )?", "", detail).strip()
    container = next((c for c in _containers(pod) if c.get("name") == status.get("name")), {})
    image = str(container.get("image") or image)
    told = f": {shorten(detail, _WORDS)}" if detail else f" ({reason})"
    text = sentence(f"Pod {name_of(pod)} cannot pull image {image}{told}")
    remedy = "Credentials go into spec.imagePullSecrets; another spec.image needs a new job."
    return Trouble("ImagePull", f"{text} {remedy}", pod, image, bool(detail))


def _containers(pod: Object) -> list[Mapping[str, Any]]:
    spec = pod.get("spec") or {}
    return [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]


def _starting(pod: Object) -> str:
    node = (pod.get("spec") or {}).get("nodeName")
    where = f" on node {node}" if node else ""
    for status in container_statuses(pod):
        waiting = (status.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") != "PodInitializing":
            return (
                f"Pod {name_of(pod)} is starting{where}: {waiting.get('reason')}. "
                f"If that lasts, `kubectl describe pod {name_of(pod)}` shows the kubelet's events."
            )
        if status.get("name") == "wait-gcs-ready" and "running" in (status.get("state") or {}):
            return f"Pod {name_of(pod)} runs{where} and waits for Ray's head."
    if not any(True for _ in container_statuses(pod)):
        return f"Pod {name_of(pod)} is starting{where}."
    return f"Pod {name_of(pod)} runs{where} and is not Ready yet."


def describe_end(status: Mapping[str, Any]) -> str | None:
    """How a container ended, last time: exit code, reason, and what it left as its termination message."""
    state, last = status.get("state") or {}, status.get("lastState") or {}
    ended = state.get("terminated") or last.get("terminated")
    if not ended:
        return None
    reason = str(ended.get("reason") or "")
    words = f"ended with exit code {ended.get('exitCode')}"
    words += f" ({reason})" if reason not in ("", "Error", "Completed") else ""
    message = str(ended.get("message") or "").strip()
    return f"{words}: {shorten(message, 4096, keep='end')}" if message else words


__all__ = ["ORDER", "Trouble", "describe_end", "trouble"]
