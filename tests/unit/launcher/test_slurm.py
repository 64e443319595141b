"""SLURM without SLURM: what --slurm is read as, the script it makes, and what a step or an allocation implies."""

import subprocess

import pytest

from refusals import assert_refused, refuses
from shardwise.cli.main import main
from shardwise.launcher import slurm as slurm_submit
from shardwise.launcher.slurm import (
    BatchSpec,
    batch_script,
    gpus_per_node,
    nodes_of_allocation,
    nodes_of_step,
    read_directives,
    resolve_nproc,
)

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
OPTIONS = {"nnodes": "1", "node_rank": None, "rdzv_backend": "static", "rdzv_id": "none", "standalone": False}


def spec(**changes):
    fields = {"name": "train", "nodes": (2, 2), "command": ("python", "a b.py"), "nproc": 4, "run": "/runs/x"}
    return BatchSpec(**{**fields, "directives": {}, "grace_s": 30.0, **changes})


def directives(script):
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    return {key: value for key, _, value in (line.partition("=") for line in lines)}


@pytest.mark.parametrize(
    ("text", "read"),
    {
        "": {},
        "time=1:00:00,partition=gpu": {"time": "1:00:00", "partition": "gpu"},
        "partition=a,b,time=5": {"partition": "a,b", "time": "5"},
        "gres=gpu:h100:4,nvme:1": {"gres": "gpu:h100:4,nvme:1"},
        "export=ALL,FOO=1,exclusive": {"export": "ALL,FOO=1", "exclusive": ""},
        "exclusive,mem=0": {"exclusive": "", "mem": "0"},
        "cpus_per_task=8": {"cpus-per-task": "8"},
    }.items(),
)
def test_options_of_sbatch_are_read_with_their_commas(text, read):
    assert read_directives(text) == read


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("train.py", ("launch.slurm-syntax", "'train.py'")),
        ("time", ("launch.slurm-syntax", "'time'")),
        ("=5", ("launch.slurm-syntax", "'=5'")),
        ("time=5,,mem=1", ("launch.slurm-syntax", "KEY=VALUE")),
        ("time=", ("launch.slurm-syntax", "'time='")),
        ("nodes=2", ("launch.slurm-key-reserved", "--nnodes")),
        ("ntasks-per-node=8", ("launch.slurm-key-reserved", "--nproc")),
        ("gpus-per-task=1", ("launch.slurm-key-reserved", "gpus-per-node")),
        ("array=1-9", ("launch.slurm-key-reserved", "array=")),
        ("signal=USR1@60", ("launch.slurm-signal-invalid", "B:USR1@SECONDS")),
    ],
)
def test_what_cannot_be_a_directive_of_ours_is_refused(text, refusal):
    with refuses(*refusal):
        read_directives(text)


def test_gpus_are_counted_in_both_of_slurms_spellings():
    assert gpus_per_node({"gpus-per-node": "h100:4"}) == 4
    assert gpus_per_node({"gpus-per-node": "a100:2,h100:2"}) == 4
    assert gpus_per_node({"gres": "gpu:2,nvme:1"}) == 2
    assert gpus_per_node({"gres": "gpu"}) == 1
    assert gpus_per_node({"gres": "nvme:1"}) is None


def test_ranks_follow_the_gpus_unless_typed():
    assert resolve_nproc(None, {"gpus-per-node": "4"}) == 4
    assert resolve_nproc(None, {}) == 1
    assert resolve_nproc("2", {"gpus-per-node": "4"}) == 2
    assert resolve_nproc("gpu", {"gpus-per-node": "4"}) == 4
    assert resolve_nproc("cpu", {"gpus-per-node": "4"}) is None
    with refuses("launch.nproc-exceeds-gpus", "--nproc 2", "gpus-per-node=4"):
        resolve_nproc("4", {"gpus-per-node": "2"})


def test_script_asks_for_one_launcher_per_node_with_the_cores_of_its_ranks():
    script = batch_script(spec())
    found = directives(script)
    assert (found["nodes"], found["ntasks-per-node"], found["cpus-per-task"]) == ("2", "1", "4")
    assert found["output"] == "/runs/x/slurm-%j.out"
    assert "python 'a b.py' &" in script


def test_script_has_time_to_save_and_requeues():
    script = batch_script(spec(grace_s=120.0))
    assert directives(script)["signal"] == "B:USR1@150"
    assert "scontrol requeue" in script
    script = batch_script(spec(directives={"no-requeue": ""}))
    assert "scontrol requeue" not in script
    assert "requeue" not in directives(script)


def test_what_the_user_asks_for_wins():
    found = directives(batch_script(spec(nodes=(1, 3), directives={"job-name": "mine", "cpus-per-gpu": "12"})))
    assert (found["job-name"], found["nodes"]) == ("mine", "1-3")
    assert "cpus-per-task" not in found


def test_script_is_good_bash():
    assert subprocess.run(["bash", "-n"], input=batch_script(spec()), text=True, check=False).returncode == 0


def test_launcher_in_a_step_finds_its_place():
    found = nodes_of_step(STEP, OPTIONS, set())
    assert found["nnodes"] == "2:2"
    assert (found["node_rank"], found["master_addr"], found["rdzv_id"]) == (1, "n07", "slurm-77.0")
    assert found["master_port"] == nodes_of_step({**STEP, "SLURM_NODEID": "0"}, OPTIONS, set())["master_port"]


def test_what_is_typed_in_a_step_stays():
    typed = {**OPTIONS, "nnodes": "1:4", "rdzv_id": "me", "rdzv_endpoint": "n08:1", "rdzv_backend": "c10d"}
    found = nodes_of_step(STEP, typed, {"nnodes", "rdzv_id", "rdzv_endpoint", "rdzv_backend"})
    assert found == {"nnodes": "1:2"}
    assert nodes_of_step(STEP, {**OPTIONS, "standalone": True}, {"standalone"}) == {}


def test_nothing_is_implied_outside_a_step_of_many():
    assert nodes_of_step({}, OPTIONS, set()) == {}
    assert nodes_of_step({"SLURM_JOB_ID": "77", "SLURM_PROCID": "0"}, OPTIONS, set()) == {}
    one = {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "n07", "SLURM_PROCID": "0"}
    alone = STEP | one | {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    assert nodes_of_step(alone, OPTIONS, set()) == {"nnodes": "1"}
    assert nodes_of_step(alone, OPTIONS | {"nnodes": "1:4"}, {"nnodes"}) == {"nnodes": "1"}


@pytest.mark.parametrize(
    ("variables", "options", "refusal"),
    [
        (
            {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NUM_TASKS": "4"},
            {},
            ("launch.slurm-tasks-per-node", "srun --ntasks-per-node=1"),
        ),
        ({}, {"nnodes": "3"}, ("launch.slurm-nnodes-mismatch", "srun --nodes=3 --ntasks-per-node=1", "--nnodes 2")),
        ({}, {"nnodes": "1"}, ("launch.slurm-nnodes-mismatch", "--nnodes 2")),
    ],
)
def test_step_of_another_shape_is_refused_with_the_right_directive(variables, options, refusal):
    with refuses(*refusal):
        nodes_of_step(STEP | variables, OPTIONS | options, set(options))


def test_allocation_is_used_as_far_as_asked():
    around = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_PER_NODE": "h100:2"}
    assert nodes_of_allocation({}, (2, 2), 1) is None
    assert nodes_of_allocation(around, None, 2) == 4
    assert nodes_of_allocation(around, (2, 2), 2) == 2
    assert nodes_of_allocation(around, (2, 8), 2) == 4
    with refuses("launch.slurm-too-few-nodes", "--nodes=5"):
        nodes_of_allocation(around, (5, 5), 1)
    with refuses("launch.nproc-exceeds-gpus", "--gpus-per-node=3"):
        nodes_of_allocation(around, None, 3)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "refusal"),
    [
        (["--slurm", "train.py"], ("launch.slurm-syntax", "'train.py'")),
        (["--slurm", "time:5", "train.py"], ("launch.slurm-syntax", "'time:5'")),
        (["--slurm", "--", "missing.py"], ("launch.script-not-found", "missing.py")),
        (["--slurm", "--nnodes", "no", "train.py"], ("launch.nnodes-invalid", "'no'")),
        (["--slurm", "time=5", "train.py"], ("launch.slurm-not-found", "sbatch")),
    ],
)
def test_bad_input_is_one_sentence(folder, monkeypatch, capfd, argv, refusal):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", *argv]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert_refused(line, *refusal)
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_dry_run_needs_no_slurm_and_prints_the_ranks_of_each_node(folder, monkeypatch, capfd):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "--slurm", "gpus-per-node=2", "--nnodes", "1:2", "--dry-run", "train.py", "--lr", "1"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    assert "# node 0 (SLURM_NODEID=0): ranks 0-1 of 4; " in shown
    assert "# node 1 (optional) (SLURM_NODEID=1): ranks 2-3 of 4; " in shown
    assert shown.count("launch --nnodes=1:2 --nproc-per-node=2 --run-dir=runs/train-TIME train.py --lr 1") == 3
    assert not (folder / "runs").exists()


def test_dry_run_in_an_allocation_shows_the_step(folder, monkeypatch, capfd):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    assert main(["launch", "--slurm", "--nproc", "2", "--dry-run", "train.py"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("srun --nodes=3 --ntasks=3 --ntasks-per-node=1 ")
    assert shown.endswith("launch --nproc-per-node=2 train.py\n")


def test_a_queued_job_is_kept_when_squeue_does_not_respond(tmp_path, monkeypatch):
    for name, line in {"sbatch": "echo '77;cluster'", "squeue": "exec sleep 60"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(slurm_submit, "_COMMAND_TIMEOUT_S", 0.5)
    assert slurm_submit.submit(tmp_path / "script") == "77"


def test_controller_that_is_not_reachable_is_not_a_rejected_job(tmp_path, monkeypatch):
    text = "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with refuses("launch.slurm-unreachable", "Unknown host", "sinfo", "SLURM_CONF"):
        slurm_submit.submit(tmp_path / "script")
