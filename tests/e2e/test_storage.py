"""Training from object storage: a killed run continues on a local copy with equal losses; no file has the secret."""

import json
from pathlib import Path

from data.s3_server import SECRET, s3_server, upload

from e2e.processes import Command
from e2e.test_resume import losses

JOB = """
import os, signal
from pathlib import Path
import shardwise as sw

def on_step(context):
    if context.step == 5 and os.environ.get("RANK") == "1" and Path("remote").exists() and not Path("died").exists():
        Path("died").touch()
        os.kill(os.getpid(), signal.SIGKILL)

def data(split):
    path = "URL" if Path("remote").exists() and not Path("died").exists() else "corpus"
    return sw.datasets.tokens(path, length=16, packed=True)(split)

job = sw.Job(
    model=lambda: sw.models.decoder("llama-tiny", vocab_size=257, context=32), data=data,
    loss=sw.losses.token_cross_entropy, optimizer=sw.adamw(lr=1e-3), batch_size=4, steps=8, on_step=on_step,
)
"""


def train(folder, *arguments):
    return Command(folder, "train", "job.py", "--nproc", "2", "--plan", "ddp", *arguments).finish()


def test_a_run_killed_on_s3_continues_on_a_local_copy_with_equal_losses(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWISE_STORAGE_CACHE", str(tmp_path / "cache"))
    rows = [{"text": f"document {number} " + "text " * (number % 9)} for number in range(40)]
    (tmp_path / "documents.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Command(tmp_path, "data", "prepare", "documents.jsonl", "--out", "corpus", "--processes", "1").finish()
    with s3_server() as endpoint:
        url = upload(endpoint, tmp_path / "corpus", "web")
        (tmp_path / "job.py").write_text(JOB.replace("URL", url))
        whole = train(tmp_path, "--run-dir", "whole")
        assert whole.returncode == 0, whole.stdout + whole.stderr
        (tmp_path / "remote").touch()
        killed = train(tmp_path, "--run-dir", "killed", "--save-every", "2", "--max-restarts", "1")
    assert killed.returncode == 0, killed.stdout + killed.stderr
    assert (tmp_path / "died").exists()
    assert list((tmp_path / "cache").glob("*/*-0"))  # the first attempt read from S3
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    files = [path for folder in ("killed", "cache") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    assert SECRET not in killed.stdout + killed.stderr


def test_a_job_with_a_secret_url_is_refused_before_a_run_directory_exists(tmp_path):
    secret_url = f"s3://KEY:{SECRET}@bucket/corpus"
    job = JOB.replace("data=data", f'data=sw.datasets.tokens("{secret_url}", length=16)')
    (tmp_path / "job.py").write_text(job)
    done = train(tmp_path, "--run-dir", "run")
    assert done.returncode == 2
    assert "data.url-credentials" in done.stderr
    assert SECRET not in done.stdout + done.stderr
    left = {path.name for path in Path(tmp_path).iterdir()}
    assert left <= {"job.py", "__pycache__"}
