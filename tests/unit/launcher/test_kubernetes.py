"""Manifests are valid by Kubernetes' and Kubeflow's published schemas, and contain the options of the command."""

import copy
import importlib
import re

import kubernetes_validate
import pytest
import yaml

from refusals import assert_refused
from shardwise.cli.main import main
from shardwise.launcher.kubernetes import to_yaml

KUBERNETES = ("1.31", "1.37")
"""The first in which policies for failed pods are stable, and the newest known."""
SPECS = {
    "least": "image=me/train:1",
    "all": "image=me/train:1,name=big,namespace=lab,gpus=8,volume=data:/data:ro,volume=out:/out,folder=/app,retries=0",
    "own secret": "image=me/train:1,secret=mine",
}


def check(document):
    """Validate by the schema of its kind; fields that it does not know are errors."""
    if document["apiVersion"].startswith("trainer.kubeflow.org/"):
        models = importlib.import_module("kubeflow_trainer_api.models")  # here: it takes 0.5 s
        model = getattr(models, "TrainerV1alpha1" + document["kind"])
        assert model.from_dict(copy.deepcopy(document)).to_dict() == document  # what it does not know, it drops
        if document["kind"] == "TrainingRuntime":
            job = document["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
            check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": job})
    else:
        for version in KUBERNETES:
            kubernetes_validate.validate(document, version, strict=True)


def emit(capsys, spec, *argv):
    assert main(["launch", "--nnodes=2", *argv, "--kubernetes", spec, "train.py", "--lr", "$(X) $1"]) == 0
    text = capsys.readouterr().out
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.mark.parametrize("kind", ["job", "trainjob"])
@pytest.mark.parametrize("spec", SPECS)
def test_manifests_are_valid(capsys, kind, spec):
    documents = emit(capsys, f"{SPECS[spec]},kind={kind}")
    secret = {"Secret"} if spec != "own secret" else set()
    expected = {"Service", "Job"} if kind == "job" else {"TrainingRuntime", "TrainJob"}
    assert set(documents) == expected | secret
    for document in documents.values():
        check(document)
        assert document["metadata"].get("namespace") == ("lab" if spec == "all" else None)


PLACES = {
    "Job": ("spec", "template", "spec", "containers", 0),
    "Service": ("spec",),
    "Secret": (),
    "TrainJob": ("spec", "trainer"),
    "TrainingRuntime": ("spec", "template", "spec", "replicatedJobs", 0, "template", "spec", "template", "spec"),
}


@pytest.mark.parametrize("kind", PLACES)
def test_a_field_that_the_schema_does_not_know_is_caught(capsys, kind):
    train = "trainjob" if kind.startswith("Train") else "job"
    document = emit(capsys, f"image=i,kind={train}")[kind]
    place = document
    for step in PLACES[kind]:
        place = place[step]
    place["nodeRank"] = "0"
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check(document)


def test_a_value_of_the_wrong_type_is_caught(capsys):
    job = emit(capsys, "image=i")["Job"]
    job["spec"]["completions"] = "2"
    with pytest.raises(kubernetes_validate.ValidationError):
        check(job)


def test_a_job_runs_the_same_command_on_every_node(capsys):
    documents = emit(capsys, "image=i,gpus=4", "--max-restarts=1")
    pod = documents["Job"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == [
        *("shardwise", "launch", "--local-addr=$(POD_IP)", "--nnodes=2", "--node-rank=$(JOB_COMPLETION_INDEX)"),
        *("--master-addr=train-0.train", "--master-port=29500", "--rdzv-id=none", "--nproc-per-node=4"),
        *("--max-restarts=1", "train.py", "--lr", "$$(X) $$1"),
    ]
    assert pod["subdomain"] == documents["Service"]["metadata"]["name"] == "train"
    assert documents["Job"]["spec"]["completions"] == 2


@pytest.mark.parametrize(
    ("volumes", "options", "expected"),
    [
        (",volume=in:/in:ro,volume=data:/data", [], ["--run-dir=/data/runs/job-TIME", "--resume=auto"]),
        (",volume=data:/data", ["--run-dir=/data/a", "--resume=never"], ["--run-dir=/data/a", "--resume=never"]),
        ("", [], []),
    ],
)
def test_pods_of_a_training_resume_from_a_run_directory_on_their_volume(capsys, volumes, options, expected):
    assert main(["train", "job.py", *options, "--kubernetes", f"image=i{volumes}"]) == 0
    shown = capsys.readouterr()
    [job] = [document for document in yaml.safe_load_all(shown.out) if document["kind"] == "Job"]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    found = [re.sub(r"-\d{8}-\d{6}$", "-TIME", each) for each in command if each.startswith(("--run-dir", "--resume"))]
    assert found == expected
    assert ("volume=" in shown.err) == (not volumes)


def test_a_train_job_joins_at_the_pod_that_its_job_set_names(capsys):
    documents = emit(capsys, "image=i,kind=trainjob", "--nproc-per-node=3")
    trainer = documents["TrainJob"]["spec"]["trainer"]
    assert "--master-addr=train-node-0-0.train" in trainer["args"]
    assert "--nproc-per-node=3" in trainer["args"]
    assert trainer["numNodes"] == 2


def test_the_secret_is_fresh_and_in_no_command(capsys):
    values = set()
    for _ in range(2):
        documents = emit(capsys, "image=i")
        value = documents["Secret"]["stringData"]["secret"]
        values.add(value)
        assert value not in str(documents["Job"])
        (container,) = documents["Job"]["spec"]["template"]["spec"]["containers"]
        assert container["env"][1]["valueFrom"] == {"secretKeyRef": {"name": "train", "key": "secret"}}
    assert len(values) == 2


def test_preemption_costs_no_retry_and_a_failure_costs_one_of_every_node(capsys):
    spec = emit(capsys, "image=i,retries=2")["Job"]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore"]
    assert rules[0]["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert rules[1]["onExitCodes"]["values"] == [75]
    assert spec["backoffLimit"] == 4
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_ranks_have_their_time_to_save_before_the_pod_is_killed(capsys):
    spec = emit(capsys, "image=i", "--shutdown-timeout=90")["Job"]["spec"]
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 90


def test_manifests_go_into_a_file(capsys, tmp_path):
    path = tmp_path / "job.yaml"
    assert main(["launch", "--kubernetes", f"image=i,to={path}", "train.py"]) == 0
    assert [document["kind"] for document in yaml.safe_load_all(path.read_text())] == ["Secret", "Service", "Job"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_with_the_secret_is_its_owners_alone(tmp_path, is_there):
    path = tmp_path / "job.yaml"
    if is_there:
        path.touch(mode=0o644)
    assert main(["launch", "--kubernetes", f"image=i,to={path}", "train.py"]) == 0
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("spec", "refusal"),
    [
        ("gpus=8", ("launch.kubernetes-no-image",)),
        ("image=i,gpu=8", ("launch.kubernetes-unknown-key", "did you mean 'gpus'")),
        ("image=i,gpus=many", ("launch.kubernetes-number-invalid", "gpus", "many")),
        ("image=i,kind=jobs", ("launch.kubernetes-unknown-kind", "did you mean 'job'")),
        ("image=i,name=Big_Job", ("launch.kubernetes-name-invalid", "Big_Job")),
        ("image=i,volume=data", ("launch.kubernetes-volume-invalid", "volume=CLAIM:/PATH")),
        ("image=", ("launch.kubernetes-no-value", "image")),
        ("image=i,image=j", ("launch.kubernetes-key-repeated", "image")),
    ],
)
def test_an_invalid_spec_is_rejected(capsys, spec, refusal):
    assert main(["launch", "--kubernetes", spec, "train.py"]) == 2
    assert_refused(capsys.readouterr().err, *refusal)


@pytest.mark.parametrize(
    "value",
    [
        "no",
        "1",
        "1e3",
        "a: b",
        "- a",
        "",
        " ",
        "#",
        "~",
        "null",
        "0x1",
        "é\n\"'\\",
        "@a",
        "a:",
        "\u2028",
        "\t",
        "12:30",
    ],
)
def test_text_stays_text_in_yaml(value):
    document = {value: [value, {"a": value, "b": [], "c": {}}, [value, 1, True]], "empty": []}
    assert yaml.safe_load(to_yaml([document])) == document
