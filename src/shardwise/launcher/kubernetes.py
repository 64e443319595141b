"""The same launch as manifests: an indexed Job with a headless service, or Kubeflow Trainer's TrainJob."""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import LaunchError, nearest
from shardwise.runs.console import PREEMPTED

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


POD_INDEX = "$(JOB_COMPLETION_INDEX)"
"""Of a pod of an indexed Job, set by Kubernetes: the node's rank."""
POD_IP = "$(POD_IP)"
_KEYS = ("image", "kind", "name", "namespace", "gpus", "volume", "folder", "secret", "retries", "to")
_KINDS = ("job", "trainjob")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST = 48
"""Characters of a name: with "-node-0-1234" behind it, it must fit into the 63 of a host name."""
_CONTAINER = "node"
_REPLICATED_JOB = "node"
_SECRET_KEY = "secret"  # noqa: S105 - the name of a field
_MARGIN_S = 30
"""What the launcher gets after its ranks' time to save, before Kubernetes kills the pod."""


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim, and where it is mounted."""

    claim: str
    path: str
    is_read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class PodsSpec:
    """What Kubernetes has to know that is not in the command."""

    image: str
    """With Python, shardwise and the script in it."""
    kind: str = "job"
    name: str
    namespace: str = ""
    """Empty leaves it to kubectl."""
    gpus: int = 0
    """NVIDIA GPUs of every node."""
    volumes: tuple[Volume, ...] = ()
    folder: str = ""
    """In which the command runs; empty is the image's own."""
    secret: str = ""
    """Name of a Secret that is there, with a field "secret"; empty makes one."""
    retries: int = 3
    """Times all nodes are started again after a failure that nobody asked for."""
    to: str = ""
    """File that is written; empty is stdout."""


def read_kubernetes(text: str, default_name: str) -> PodsSpec:
    """Read --kubernetes: KEY=VALUE,..., of which volume may come several times."""
    found: dict[str, list[str]] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in _KEYS:
            raise LaunchError(
                f"--kubernetes has {part!r}, which does not begin with one of its keys",
                code="launch.kubernetes-unknown-key",
                fix=nearest(key, _KEYS),
            )
        if not equals or not value:
            raise LaunchError(
                f"--kubernetes has {key} without a value", code="launch.kubernetes-no-value", fix=f"write {key}=VALUE"
            )
        if key in found and key != "volume":
            raise LaunchError(
                f"--kubernetes has {key} twice", code="launch.kubernetes-key-repeated", fix="leave one out"
            )
        found.setdefault(key, []).append(value)
    if "image" not in found:
        raise LaunchError(
            "--kubernetes names no image",
            code="launch.kubernetes-no-image",
            fix="add image=REGISTRY/NAME:TAG, with shardwise in it",
        )
    one = {key: values[0] for key, values in found.items()}
    kind = one.get("kind", "job")
    if kind not in _KINDS:
        raise LaunchError(
            f"--kubernetes has kind={kind}", code="launch.kubernetes-unknown-kind", fix=nearest(kind, _KINDS)
        )
    return PodsSpec(
        image=one["image"],
        kind=kind,
        name=_checked("name", one.get("name") or _name_of(default_name)),
        namespace=_checked("namespace", one.get("namespace", "")),
        gpus=_number("gpus", one.get("gpus", "0")),
        volumes=tuple(_volume(value) for value in found.get("volume", ())),
        folder=one.get("folder", ""),
        secret=_checked("secret", one.get("secret", "")),
        retries=_number("retries", one.get("retries", "3")),
        to=one.get("to", ""),
    )


def node_0(spec: PodsSpec) -> str:
    """Return the name by which the pods of a run reach the first of them."""
    pod = f"{spec.name}-0" if spec.kind == "job" else f"{spec.name}-{_REPLICATED_JOB}-0-0"
    return f"{pod}.{spec.name}"


def manifests(spec: PodsSpec, arguments: Sequence[str], *, num_nodes: int, grace_s: float) -> list[dict[str, Any]]:
    """Return the documents that run `shardwise` with these arguments on every node; they may have a fresh secret."""
    made = [] if spec.secret else [_secret(spec)]
    pod = _pod(spec, grace_s)
    if spec.kind == "trainjob":
        return [*made, _runtime(spec, pod, num_nodes), _train_job(spec, arguments, num_nodes)]
    container = pod["containers"][0]
    pod = {"subdomain": spec.name, **pod, "containers": [{**container, "command": ["shardwise", *arguments]}]}
    job = _document(spec, "batch/v1", "Job", spec=_job_spec(spec, pod, num_nodes))
    return [*made, _service(spec), job]


def _job_spec(spec: PodsSpec, pod: dict[str, Any], num_nodes: int) -> dict[str, Any]:
    """One pod for every node, numbered, and replaced when it fails.

    A node that fails takes the run with it, so that every retry may cost a failure of each pod. What was preempted, and
    ranks that saved because they were asked to stop, are started again without being counted.
    """
    saved = {"containerName": _CONTAINER, "operator": "In", "values": [PREEMPTED]}
    return {
        "completionMode": "Indexed",
        "completions": num_nodes,
        "parallelism": num_nodes,
        "backoffLimit": spec.retries * num_nodes,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": saved},
            ]
        },
        "template": {"spec": pod},
    }


def _pod(spec: PodsSpec, grace_s: float) -> dict[str, Any]:
    secret = {"name": spec.secret or spec.name, "key": _SECRET_KEY}
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108 - where DataLoader workers hand over
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    for number, volume in enumerate(spec.volumes):
        read_only = {"readOnly": True} if volume.is_read_only else {}
        mounts.append({"name": f"volume-{number}", "mountPath": volume.path, **read_only})
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": volume.claim, **read_only}})
    container = {
        "name": _CONTAINER,
        "image": spec.image,
        **({"workingDir": spec.folder} if spec.folder else {}),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "SHARDWISE_SECRET", "valueFrom": {"secretKeyRef": secret}},
        ],
        **({"resources": {"limits": {"nvidia.com/gpu": str(spec.gpus)}}} if spec.gpus else {}),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",  # a policy for failed pods needs it: they are replaced, not restarted in place
        "terminationGracePeriodSeconds": int(grace_s) + _MARGIN_S,
        "containers": [container],
        "volumes": volumes,
    }


def _service(spec: PodsSpec) -> dict[str, Any]:
    """Give every pod a name, ready or not: nodes join before any of them is."""
    selector = {"batch.kubernetes.io/job-name": spec.name}
    body = {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True}
    return _document(spec, "v1", "Service", spec=body)


def _secret(spec: PodsSpec) -> dict[str, Any]:
    """A fresh secret, fixed: one that changed under a running job would shut replaced pods out."""
    return _document(spec, "v1", "Secret", immutable=True, stringData={_SECRET_KEY: secrets.token_hex(16)})


def _runtime(spec: PodsSpec, pod: dict[str, Any], num_nodes: int) -> dict[str, Any]:
    """Kubeflow's half with how nodes run: a TrainJob alone has no rule for exit codes that are not failures."""
    template = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": _job_spec(spec, pod, num_nodes),
    }
    jobs = [{"name": _REPLICATED_JOB, "template": template}]
    body = {"mlPolicy": {"numNodes": num_nodes}, "template": {"spec": {"replicatedJobs": jobs}}}
    return _document(spec, "trainer.kubeflow.org/v1alpha1", "TrainingRuntime", spec=body)


def _train_job(spec: PodsSpec, arguments: Sequence[str], num_nodes: int) -> dict[str, Any]:
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": spec.name}
    trainer = {"image": spec.image, "command": ["shardwise"], "args": list(arguments), "numNodes": num_nodes}
    body = {"runtimeRef": reference, "trainer": trainer}
    return _document(spec, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec=body)


def _document(about: PodsSpec, api_version: str, kind: str, **body: Any) -> dict[str, Any]:
    metadata = {"name": about.name, **({"namespace": about.namespace} if about.namespace else {})}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def _name_of(text: str) -> str:
    """Return a name of Kubernetes for a script's: small letters, digits and dashes, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:_LONGEST].strip("-")


def _checked(key: str, value: str) -> str:
    if value and (not _NAME.fullmatch(value) or len(value) > _LONGEST):
        raise LaunchError(
            f"--kubernetes has {key}={value}",
            code="launch.kubernetes-name-invalid",
            fix=f"use up to {_LONGEST} small letters, digits and dashes, a letter first",
        )
    return value


def _number(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise LaunchError(
            f"--kubernetes has {key}={text}",
            code="launch.kubernetes-number-invalid",
            fix=f"write {key}= and a whole number",
        )
    return int(text)


def _volume(text: str) -> Volume:
    match = re.fullmatch(r"([a-z0-9][-a-z0-9.]*):(/[^:]*)(:ro)?", text)
    if match is None:
        raise LaunchError(
            f"--kubernetes has volume={text}",
            code="launch.kubernetes-volume-invalid",
            fix="write volume=CLAIM:/PATH, or CLAIM:/PATH:ro",
        )
    return Volume(match[1], match[2], match[3] is not None)


# Manifests as YAML, written by hand: plain mappings, lists and scalars need no library.


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_UNPRINTED = re.compile("[\\x7f-\\x9f\\u2028\\u2029\\ufeff]")
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Which YAML 1.1 does not read as text."""


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Return documents of mappings, lists, strings, whole numbers and booleans as one YAML text."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        return [line for key, inner in value.items() for line in _entry(f"{_scalar(key)}:", inner)]
    if isinstance(value, list) and value:
        return [line for inner in value for line in _item(inner)]
    return [_scalar(value)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, dict | list) and value:
        return [key, *(f"  {line}" for line in _lines(value))]
    return [f"{key} {_scalar(value)}"]


def _item(value: Any) -> list[str]:
    first, *rest = _lines(value)
    return [f"- {first}", *(f"  {line}" for line in rest)]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    # What JSON quotes, YAML reads, but for characters that it takes for line ends or does not print.
    quoted = json.dumps(value, ensure_ascii=False)
    return _UNPRINTED.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
