"""Kubernetes manifests of a launch: an indexed Job with a headless Service, or a TrainJob of Kubeflow Trainer."""

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
"""The node rank: Kubernetes sets this variable in each pod of an indexed Job."""
POD_IP = "$(POD_IP)"
_KEYS = ("image", "kind", "name", "namespace", "gpus", "volume", "folder", "secret", "retries", "to")
_KINDS = ("job", "trainjob")
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME_CHARS = 48
"""A name with the suffix "-node-0-1234" must fit into the 63 characters of a host name."""
_CONTAINER = "node"
_REPLICATED_JOB = "node"
_SECRET_KEY = "secret"  # noqa: S105 - the name of a field
_MARGIN_S = 30
"""Seconds that the launcher has to exit after the ranks' shutdown timeout, before the pod is killed."""


@dataclass(frozen=True)
class Volume:
    """A PersistentVolumeClaim and its mount path."""

    claim: str
    path: str
    is_read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class PodsSpec:
    """The pod settings of --kubernetes, which are not part of the launch command."""

    image: str
    """Container image with Python, shardwise and the script."""
    kind: str = "job"
    name: str
    namespace: str = ""
    """Namespace of the resources; if empty, kubectl's current namespace."""
    gpus: int = 0
    """Number of NVIDIA GPUs per node."""
    volumes: tuple[Volume, ...] = ()
    folder: str = ""
    """Working directory of the command; if empty, the image's default."""
    secret: str = ""
    """Name of an existing Secret with the key "secret"; if empty, the manifests contain a new Secret."""
    retries: int = 3
    """Number of times that all nodes are restarted after a failure; preemptions are not counted."""
    to: str = ""
    """Output file; if empty, standard output."""


def read_kubernetes(text: str, default_name: str) -> PodsSpec:
    """Parse --kubernetes KEY=VALUE,...; the key `volume` may be repeated."""
    found: dict[str, list[str]] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if key not in _KEYS:
            raise LaunchError(
                f"--kubernetes entry {part!r} does not start with a known key",
                code="launch.kubernetes-unknown-key",
                fix=nearest(key, _KEYS),
            )
        if not equals or not value:
            raise LaunchError(
                f"--kubernetes key {key} has no value", code="launch.kubernetes-no-value", fix=f"write {key}=VALUE"
            )
        if key in found and key != "volume":
            raise LaunchError(
                f"--kubernetes key {key} is repeated", code="launch.kubernetes-key-repeated", fix=f"pass {key} once"
            )
        found.setdefault(key, []).append(value)
    if "image" not in found:
        raise LaunchError(
            "--kubernetes requires an image",
            code="launch.kubernetes-no-image",
            fix="add image=REGISTRY/NAME:TAG of an image that contains shardwise",
        )
    one = {key: values[0] for key, values in found.items()}
    kind = one.get("kind", "job")
    if kind not in _KINDS:
        raise LaunchError(
            f"--kubernetes kind={kind} is unknown", code="launch.kubernetes-unknown-kind", fix=nearest(kind, _KINDS)
        )
    return PodsSpec(
        image=one["image"],
        kind=kind,
        name=_checked("name", one.get("name") or _name_of(default_name)),
        namespace=_checked("namespace", one.get("namespace", "")),
        gpus=_parse_number("gpus", one.get("gpus", "0")),
        volumes=tuple(map(_parse_volume, found.get("volume", ()))),
        folder=one.get("folder", ""),
        secret=_checked("secret", one.get("secret", "")),
        retries=_parse_number("retries", one.get("retries", "3")),
        to=one.get("to", ""),
    )


def node_0(spec: PodsSpec) -> str:
    """Return the host name under which all pods of a run reach node 0."""
    pod = f"{spec.name}-0" if spec.kind == "job" else f"{spec.name}-{_REPLICATED_JOB}-0-0"
    return f"{pod}.{spec.name}"


def manifests(spec: PodsSpec, arguments: Sequence[str], *, num_nodes: int, grace_s: float) -> list[dict[str, Any]]:
    """Return the manifests that run `shardwise` with these arguments on every node, and a new Secret if none is set."""
    secret = [] if spec.secret else [_secret(spec)]
    pod = _pod(spec, grace_s)
    if spec.kind == "trainjob":
        return [*secret, _runtime(spec, pod, num_nodes), _train_job(spec, arguments, num_nodes)]
    container = pod["containers"][0]
    pod = {"subdomain": spec.name, **pod, "containers": [{**container, "command": ["shardwise", *arguments]}]}
    job = _document(spec, "batch/v1", "Job", spec=_job_spec(spec, pod, num_nodes))
    return [*secret, _service(spec), job]


def _job_spec(spec: PodsSpec, pod: dict[str, Any], num_nodes: int) -> dict[str, Any]:
    """Return the spec of an indexed Job with one pod per node, which replaces failed pods.

    A failed node ends the run on all nodes, so each retry may add one failure per pod. Pods that were preempted, or
    that exited after a requested checkpoint, are replaced without counting against the limit.
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
    mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]  # noqa: S108 - DataLoader workers pass tensors there
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
        "restartPolicy": "Never",  # required by podFailurePolicy
        "terminationGracePeriodSeconds": int(grace_s) + _MARGIN_S,
        "containers": [container],
        "volumes": volumes,
    }


def _service(spec: PodsSpec) -> dict[str, Any]:
    """Return the headless Service that gives pods DNS names, even before they are ready, so that nodes can join."""
    selector = {"batch.kubernetes.io/job-name": spec.name}
    body = {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": True}
    return _document(spec, "v1", "Service", spec=body)


def _secret(spec: PodsSpec) -> dict[str, Any]:
    """Return a Secret with a new random value; immutable, because replaced pods must use the same value."""
    return _document(spec, "v1", "Secret", immutable=True, stringData={_SECRET_KEY: secrets.token_hex(16)})


def _runtime(spec: PodsSpec, pod: dict[str, Any], num_nodes: int) -> dict[str, Any]:
    """Return the TrainingRuntime, which contains the pod failure policy that a TrainJob cannot express."""
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
    """Return a valid Kubernetes name for a script: lowercase letters, digits and dashes, starting with a letter."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}"
    return name[:_MAX_NAME_CHARS].strip("-")


def _checked(key: str, value: str) -> str:
    if value and (not _NAME.fullmatch(value) or len(value) > _MAX_NAME_CHARS):
        raise LaunchError(
            f"--kubernetes {key}={value} is not a valid name",
            code="launch.kubernetes-name-invalid",
            fix=f"use up to {_MAX_NAME_CHARS} lowercase letters, digits and dashes, starting with a letter",
        )
    return value


def _parse_number(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text):
        raise LaunchError(
            f"--kubernetes {key} must be an integer from 0 to 9999, got {text}",
            code="launch.kubernetes-number-invalid",
            fix=f"write {key}=N",
        )
    return int(text)


def _parse_volume(text: str) -> Volume:
    match = re.fullmatch(r"([a-z0-9][-a-z0-9.]*):(/[^:]*)(:ro)?", text)
    if match is None:
        raise LaunchError(
            f"--kubernetes volume must be CLAIM:/PATH or CLAIM:/PATH:ro, got {text!r}",
            code="launch.kubernetes-volume-invalid",
            fix="write volume=CLAIM:/PATH or volume=CLAIM:/PATH:ro",
        )
    return Volume(match[1], match[2], match[3] is not None)


# A YAML writer for mappings, lists and scalars, so that the launcher does not depend on a YAML library.


_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_UNPRINTABLE = re.compile("[\\x7f-\\x9f\\u2028\\u2029\\ufeff]")
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Plain scalars that YAML 1.1 parses as booleans or null."""


def to_yaml(documents: Iterable[Mapping[str, Any]]) -> str:
    """Serialize documents of mappings, lists, strings, integers and booleans to one YAML stream."""
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
    # A JSON scalar is valid YAML, except for line separators and unprintable characters, which need an escape.
    quoted = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
