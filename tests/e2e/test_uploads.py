"""Training with --upload: a run whose machine is lost continues on another one with equal losses."""

import json
import multiprocessing
import os
import shutil
import signal
from random import Random

import pytest
import torch
from data.s3_proxy import s3_proxy
from data.s3_server import BUCKET, SECRET, put, s3_process

from e2e.processes import Command, shardwise, wait_for, working_in
from e2e.test_resume import losses
from refusals import assert_refused
from shardwise.checkpoint import save
from shardwise.checkpoint.download import find_remote_damage
from shardwise.checkpoint.remote import RemoteCheckpoints
from shardwise.checkpoint.uploader import Uploader
from shardwise.data.storage import uploads
from shardwise.data.storage.uploads import unfinished_uploads
from shardwise.runs.directory import Keep

JOB = """
import time
from pathlib import Path
import shardwise as sw

def on_step(context):
    time.sleep(0.5 if Path("slow").exists() and context.step > 3 else 0)

def data(split):
    return sw.datasets.text(length=16)(split) if split == "train" else None

job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", context=32), data=data,
    loss=sw.losses.token_cross_entropy, optimizer=sw.adamw(lr=1e-3), batch_size=8, steps=8, on_step=on_step,
)
"""
FP64 = [
    option for part in ("parameter", "compute", "reduce", "optimizer") for option in ("--set", f"precision.{part}=fp64")
]
URL = f"s3://{BUCKET}/run"


@pytest.fixture(scope="module")
def endpoint():
    with s3_process() as endpoint:
        yield endpoint


def events(run):
    return [json.loads(line) for line in (run / "events" / "rank0.jsonl").read_text().splitlines()]


def uploaded(run):
    return [event["step"] for event in events(run) if event["kind"] == "upload"]


def test_a_run_continues_on_an_empty_machine_under_another_plan(tmp_path, endpoint):
    (tmp_path / "job.py").write_text(JOB)
    whole = shardwise(tmp_path, "train", "job.py", *FP64, "--run-dir", "whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    (tmp_path / "slow").touch()
    options = ("train", "job.py", *FP64, "--save-every", "2", "--upload", URL, "--resume", "auto")
    first = Command(tmp_path, *options, "--nproc", "2", "--plan", "zero2", "--run-dir", "first")
    events_file = tmp_path / "first" / "events" / "rank0.jsonl"
    wait_for(lambda: events_file.exists() and 4 in uploaded(tmp_path / "first"), 60, first.output)
    for pid in working_in(tmp_path):
        os.kill(pid, signal.SIGKILL)
    first.finish()
    shutil.rmtree(tmp_path / "first")
    (tmp_path / "slow").unlink()
    second = shardwise(tmp_path, *options, "--run-dir", "second")
    output = second.stdout + second.stderr
    assert second.returncode == 0, output
    found, expected = losses(tmp_path / "second"), losses(tmp_path / "whole")
    assert min(found) in {4, 6}  # from 0; the checkpoint of step 6 may have been uploaded before the processes ended
    assert [found[step] for step in sorted(found)] == pytest.approx(
        [expected[step] for step in sorted(found)], rel=1e-9
    )
    assert uploaded(tmp_path / "second")[-1] == 8
    assert f"is saved and uploaded to {URL}" in output
    listed = shardwise(tmp_path, "checkpoint", "ls", URL).stdout
    assert "step-00000008 (latest)" in listed
    assert "damaged" not in listed
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in output + listed
    put(endpoint, "run/checkpoints/step-00000008/rank-00000.safetensors", b"damaged")
    checked = shardwise(tmp_path, "checkpoint", "check", URL)
    assert checked.returncode == 3
    assert "step-00000008/rank-00000.safetensors has 7 bytes" in checked.stderr


def test_uploads_that_cannot_work_are_refused_before_a_run_directory_exists(tmp_path, endpoint):
    (tmp_path / "job.py").write_text(JOB)
    for environ, url, code in (
        ({}, "s3://no-such-bucket/run", "data.bucket-missing"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, f"s3://{BUCKET}/other", "data.storage-unreachable"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, f"s3://{BUCKET}/other", "data.credentials-missing"),
    ):
        done = shardwise(tmp_path, "train", "job.py", "--upload", url, "--run-dir", "run", **environ)
        assert done.returncode == 2, done.stdout + done.stderr
        assert_refused(done.stderr, code, url)
    assert {path.name for path in tmp_path.iterdir()} <= {"job.py", "__pycache__"}


@pytest.mark.prove
def test_after_a_stop_request_the_checkpoint_is_uploaded_now_or_by_the_next_run(tmp_path, endpoint):
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "slow").touch()
    url = f"s3://{BUCKET}/stopped"
    options = ("--nproc", "2", "--plan", "ddp", "--set", "steps=40", "--upload", url, "--resume", "auto")

    def stopped():
        run = Command(tmp_path, "train", "job.py", *options, "--run-dir", "run")
        wait_for(lambda: "\nstep " in run.output(), 60, run.output)
        run.send_signal(signal.SIGTERM)
        return run.finish()

    with s3_proxy(endpoint) as proxy:
        proxy.reset(lambda method, path, number: "denied" if "step-" in path and method == "PUT" else None)
        done = stopped()
    assert done.returncode == 75, done.stdout + done.stderr
    assert f"stopped, saved but not uploaded to {url}; continue with: shardwise train" in done.stderr
    assert "none-found" in shardwise(tmp_path, "checkpoint", "ls", url).stderr
    done = stopped()
    assert done.returncode == 75, done.stdout + done.stderr
    assert f"stopped, saved and uploaded to {url}" in done.stderr
    assert "sound" in shardwise(tmp_path, "checkpoint", "ls", url).stdout


def upload_checkpoints(paths, url, part_bytes):
    uploads.PART_BYTES = part_bytes
    uploader = Uploader(RemoteCheckpoints.of_run(url), Keep(last=1))
    for path in paths:
        uploader.submit(path)
        uploader.wait(None)


@pytest.mark.prove
def test_an_uploader_killed_many_times_ends_and_sends_little_twice(tmp_path, endpoint):
    """Kills at random moments: complete checkpoints are visible after each, and what arrived is not sent again."""
    random, url, part_bytes = Random(5), f"s3://{BUCKET}/killed", 5 * 2**20
    for step in (1, 2):
        save(tmp_path, step, {"model/x": torch.randn(6 * 2**20), "model/y": torch.randn(10)}, {}, group=None)
    paths = [tmp_path / f"step-0000000{step}" for step in (1, 2)]
    remote, num_kills = RemoteCheckpoints.of_run(url), 0
    with s3_proxy(endpoint) as proxy:
        while True:
            process = multiprocessing.get_context("fork").Process(
                target=upload_checkpoints, args=(paths if not remote.scan().complete else paths[1:], url, part_bytes)
            )
            process.start()
            process.join(random.uniform(0.1, 0.5) * 1.1**num_kills)
            if process.exitcode is not None:
                break
            process.kill()
            process.join()
            num_kills += 1
            for name in remote.scan().complete:
                assert find_remote_damage(remote, name, deep=True) == []
        sent = sum(size for method, _, size in proxy.requests if method == "PUT")
    assert process.exitcode == 0
    assert remote.newest_first() == ["step-00000002"]
    assert unfinished_uploads(remote.folder) == {}
    size = sum(file.stat().st_size for path in paths for file in path.iterdir())
    print(f"{num_kills} kills, {sent / size:.2f} times the bytes of the checkpoints were sent")
    assert sent <= size + num_kills * 4 * part_bytes  # each kill loses what four threads are sending
