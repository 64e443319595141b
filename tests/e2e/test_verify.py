"""`shardwise verify` from the command line: exit codes, tables, JSON, and the whole proof."""

import json
import random
import re
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.parity.spec import all_plans, markdown_table
from shardwise.parity.verify import verify

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "verify"
JOBS = ("resnet", "gpt2", "llama", "byt5")
WRONG = """
import torch
import shardwise as sw

class Noisy(torch.nn.Linear):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x.flatten(1), 0.5))

job = sw.Job(
    model=lambda: Noisy(64, 10), data=sw.datasets.digits, loss=sw.losses.cross_entropy,
    optimizer=sw.sgd(lr=0.1), batch_size=8, steps=1,
)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    return tmp_path


def test_sound_plans_exit_with_0_and_a_table(folder, capfd):
    arguments = ["--nproc", "2", "--steps", "2", "--plans", "ddp,zero3+recompute=full", "--markdown", "table.md"]
    assert main(["verify", f"{EXAMPLES}/llama.py", *arguments]) == 0
    shown = capfd.readouterr()
    assert "zero3+recompute=full" in shown.out
    assert "dropout modules and attributes such as drop_rate are 0" in shown.out
    assert "llama: 2 passed; 2 steps on 2 ranks, compared with one process" in shown.out
    assert "ddp: passed" in shown.err
    assert (folder / "table.md").read_text().startswith("| plan | llama x 2 |")


def test_json_has_every_verdict(folder, capfd):
    assert main(["verify", f"{EXAMPLES}/resnet.py", "--nproc", "2", "--plans", "ddp", "--steps", "1", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["job"] == "resnet"
    assert [verdict["status"] for verdict in report["verdicts"]] == ["passed"]
    assert report["verdicts"][0]["worst"]["relative"] < 1e-9


def test_a_plan_that_fails_exits_with_3_and_names_cause_and_tensor(folder, capfd):
    assert main(["verify", "wrong.py", "--nproc", "2", "--plans", "ddp"]) == 3
    shown = " ".join(capfd.readouterr().out.split())
    assert "random numbers: the model samples random numbers" in shown
    assert "first beyond its limit: loss of step 1" in shown


def test_shrunk_and_overridden_jobs_are_verified_too(folder, capfd):
    arguments = ["--nproc", "2", "--plans", "ddp", "--shrink", "--set", "batch_size=8", "--steps", "1"]
    assert main(["verify", f"{ROOT}/examples/text.py", *arguments]) == 0


@pytest.mark.prove
def test_resume_is_proven_with_kills_and_its_own_message(folder, capfd):
    arguments = ["--resume", "--nproc", "2", "--steps", "4", "--plans", "zero3"]
    assert main(["verify", f"{EXAMPLES}/llama.py", *arguments]) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert re.search(r"killed after step [12] and", shown)  # on a busy machine the first kill comes a step later
    assert "resumed on 2 ranks, then as zero3 on 1 rank" in shown
    assert "llama: 1 passed; 4 steps on 2 ranks, compared with an uninterrupted run" in shown


def test_a_resume_that_is_not_exact_exits_with_3_and_names_the_cause(folder, capfd):
    assert main(["verify", "wrong.py", "--resume", "--nproc", "2", "--plans", "ddp", "--json"]) == 3
    report = json.loads(capfd.readouterr().out)
    assert report["steps"] == 6
    assert [finding["cause"] for finding in report["verdicts"][0]["findings"]] == ["random numbers"]


BAD = {
    "too few steps to resume": (["--resume", "--steps", "3"], "--steps 4 or more"),
    "unknown preset": (["--plans", "fspd"], "'fsdp'"),
    "plan for another world": (["--plans", "pp2.tp2"], "4 ranks"),
    "no plan": (["--plans", ","], "contains no plan"),
    "unknown job key": (["--set", "batchsize=8"], "'batch_size'"),
    "unknown precision": (["--precision", "bf16"], "fp64"),
    "nowhere to write": (["--markdown", "no/where.md"], "[cli.output-folder-missing]"),
    "no steps": (["--steps", "0"], "steps"),
    "batch that does not divide": (["--plans", "ddp", "--set", "batch_size=3"], "2 or 4"),
    "model that cannot be shrunk": (["--plans", "ddp", "--shrink"], "got Noisy"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD)
def test_bad_input_exits_with_2_and_one_sentence(folder, capfd, arguments, expected):
    assert main(["verify", "wrong.py", "--nproc", "2", *arguments]) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("shardwise: ")
    assert expected in lines[0]


def test_a_world_that_is_already_there_is_refused(folder, capfd, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", "wrong.py"]) == 2
    assert "starts its own ranks" in capfd.readouterr().err


def test_a_plan_that_does_not_fit_the_job_exits_with_2_when_named(folder, capfd):
    assert main(["verify", "wrong.py", "--nproc", "2", "--plans", "tp"]) == 2
    assert "refused" in capfd.readouterr().out


HEAD = """# Every plan compared with one process

Made by `make prove`. Each job of `examples/verify` trains {steps} steps under each plan and in one process, from the
same weights and data; the third step is short and uneven. A cell is the largest relative difference of any loss,
gradient (every step, by name), gradient norm, final parameter or buffer, in fp64, and must stay below 1e-9. Cells with
~ are plans that change the arithmetic: the largest relative difference of a loss from fp32. In an empty cell, the plan
does not support that number of ranks, or that job; the reasons are below the table.

"""
STEPS = 3


@pytest.fixture(scope="module")
def reports():
    """Reports of the whole proof; the docs table is written when all of them are there."""
    found = {}
    yield found
    if len(found) == 2 * len(JOBS):
        ordered = [found[job, nproc] for nproc in (2, 4) for job in JOBS]
        reasons = {
            f"- `{verdict.plan}`, {report.job}: {verdict.reason}"
            for report in ordered
            for verdict in report.verdicts
            if verdict.status == "does not apply"
        }
        text = HEAD.format(steps=STEPS) + markdown_table(ordered) + "\n" + "\n".join(sorted(reasons)) + "\n"
        (ROOT / "docs" / "results" / "verify-table.md").write_text(text)


@pytest.mark.representative("llama-4", "byt5-2")
@pytest.mark.slow
@pytest.mark.parametrize(("job", "nproc"), [("resnet", 2), ("gpt2", 2), ("llama", 4), ("byt5", 2)])
def test_a_slice_of_all_plans_computes_what_one_process_computes(job, nproc):
    slow = ("compile", "powersgd") if job == "llama" else ("compile", "powersgd", "pp", "tp")
    quick = [name for name in all_plans(nproc) if not any(part in name for part in slow)]
    chosen = random.Random(f"{job} {nproc}").choice(quick)
    report = verify(f"{EXAMPLES}/{job}.py", [chosen], nproc=nproc, steps=STEPS)
    assert report.count("failed") == 0, report


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("nproc", [2, 4])
@pytest.mark.parametrize("job", JOBS)
def test_every_plan_computes_what_one_process_computes(job, nproc, reports):
    report = verify(f"{EXAMPLES}/{job}.py", nproc=nproc, steps=STEPS)
    statuses = {verdict.plan: (verdict.status, verdict.reason) for verdict in report.verdicts}
    assert report.count("failed") == 0, statuses
    assert report.count("passed") >= 14, statuses
    reports[job, nproc] = report


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_every_exact_plan_is_resumed_as_the_next_one_on_other_ranks():
    report = verify(f"{EXAMPLES}/llama.py", nproc=4, steps=6, resume=True)
    statuses = {verdict.plan: (verdict.status, verdict.reason, verdict.findings) for verdict in report.verdicts}
    assert report.count("failed") == 0, statuses
    assert report.count("passed") >= 20, statuses


@pytest.mark.prove
def test_three_axes_on_eight_ranks_compute_what_one_process_computes():
    (verdict,) = verify(f"{EXAMPLES}/llama.py", ["pp2.shard2.tp2+accumulation=4"], nproc=8).verdicts
    assert verdict.status == "passed", verdict
