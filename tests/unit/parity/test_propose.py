"""Rules proposed for a job: confirmed beside one process, narrowed where they fail, written down, or refused."""

import json
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.job import load_job, refer
from shardwise.job.job import rules_to_toml
from shardwise.parallel.propose_rules import ProposedSplit
from shardwise.parity.propose import RulesReport, narrow, propose_rules
from shardwise.parity.spec import KEYED, RANDOM, Finding, Gap, PlanVerdict, VerifySpec
from shardwise.parity.verify import verify

ROOT = Path(__file__).resolve().parents[3]
NO_RULES = ROOT / "examples" / "verify" / "no_rules.py"
ARCHITECTURES = ROOT / "examples" / "verify" / "architectures.py"
FAMILIES = ROOT / "examples" / "verify" / "families.py"
UNRULED = Path(__file__).parent / "unruled.py"


def proposal(path, job, **options):
    return propose_rules(VerifySpec(job=f"{path}:{job}", nproc=2, **options))


@pytest.mark.slow
def test_rules_of_a_plain_model_are_printed_as_python_and_a_job_reads_them_from_the_file(tmp_path, capfd):
    out = tmp_path / "rules.toml"
    assert main(["verify", f"{NO_RULES}:net", "--propose-rules", "--steps", "2", "--out", str(out)]) == 0
    shown = capfd.readouterr()
    assert '    "blocks.*.attention.wq": "column",\n' in shown.out
    assert '    "blocks.*.attention": "heads",\n' in shown.out
    assert "Net: 10 tensor rules confirmed, tp=2 equals one process" in shown.err
    job = load_job(refer(f"{NO_RULES}:net", {"tensor_rules": str(out)}))
    printed = eval(f"dict({shown.out.strip().rstrip(',')})")
    assert job.tensor_rules == printed["tensor_rules"]


@pytest.mark.slow
def test_what_fails_is_narrowed_and_the_rest_is_kept():
    found = proposal(UNRULED, "sly", steps=1)
    assert found.rules == {
        "sly.one": "column_gathered",
        "sly.two": "row_split",
        "plain.one": "column",
        "plain.two": "row",
    }
    assert "first beyond its limit: loss of step 1" in found.weakened["sly.two"]
    assert found.exit_code == 0


@pytest.mark.slow
def test_a_proposal_that_fails_exits_with_3_and_one_sentence(tmp_path, capfd):
    out = tmp_path / "rules.toml"
    assert main(["verify", f"{UNRULED}:borrowed", "--propose-rules", "--steps", "1", "--out", str(out)]) == 3
    shown = capfd.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert last.startswith("Borrowed: no proposal for tp=2 equals one process")
    assert "instead of self.embed.weight[tokens]" in last
    assert not out.exists()
    assert not shown.out


def test_a_recurrent_model_cannot_be_sharded_and_exits_with_3(capfd):
    assert main(["verify", f"{NO_RULES}:recurrent", "--propose-rules", "--json"]) == 3
    shown = capfd.readouterr()
    assert json.loads(shown.out)["rules"] == {}
    (line,) = shown.err.strip().splitlines()
    assert "Recurrent cannot be sharded for tp=2" in line


class SamplingTrials:
    """Trials of a model that samples random numbers in functional dropout."""

    def __init__(self):
        self.tried = []
        self.last = None

    def passes(self, rules):
        self.tried.append(rules)
        gap = Gap(kind="loss", name="", step=2, relative=8e-6, limit=1e-9)
        finding = Finding(cause=RANDOM, evidence=f"blocks.0 samples random numbers: {KEYED}")
        self.last = PlanVerdict(plan="tp", status="failed", findings=(finding,), first=gap)
        return False


def test_a_model_that_samples_is_tried_once_and_the_sentence_ends_with_keyed_masks():
    trials = SamplingTrials()
    splits = [ProposedSplit(name=name, options=({name: "column"},)) for name in ("one", "two")]
    assert narrow(splits, trials) == {}
    assert len(trials.tried) == 1
    facts = {"job": "gpt", "model": "GPT", "nproc": 2, "rules": {}, "weakened": {}, "exit_code": 3}
    summary = RulesReport(verdict=trials.last, **facts).summary
    assert "blocks.0" in summary
    assert summary.endswith(KEYED)


BAD = {
    "file without rules": (["--out", "rules.toml"], "add --propose-rules"),
    "nowhere to write": (["--propose-rules", "--out", "no/rules.toml"], "[cli.output-folder-missing]"),
    "plans": (["--propose-rules", "--plans", "tp"], "--plans"),
    "resume": (["--propose-rules", "--resume"], "--resume"),
    "one rank": (["--propose-rules", "--nproc", "1"], "[verify.rules-one-rank]"),
    "field of a plan": (["--propose-rules", "--set", "recompute=full"], "--set recompute"),
    "rules that are not there": (["--propose-rules", "--set", "tensor_rules=no.toml"], "no.toml cannot be read"),
}


@pytest.mark.parametrize(("arguments", "expected"), BAD.values(), ids=BAD)
def test_bad_input_exits_with_2_and_one_sentence(capfd, arguments, expected):
    assert main(["verify", f"{NO_RULES}:net", *arguments]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert expected in line


def test_a_plan_with_tp_and_no_rules_names_the_command_that_finds_them():
    (verdict,) = verify(f"{UNRULED}:sly", ["tp"], nproc=2, steps=1).verdicts
    assert verdict.status == "refused"
    assert "shardwise verify JOB.py --propose-rules" in verdict.reason


@pytest.mark.prove
def test_a_plain_split_of_packed_attention_fails_by_name(tmp_path):
    rules = {"blocks.*.attention.qkv": "column", "blocks.*.attention.proj": "row"}
    (tmp_path / "wrong.toml").write_text(rules_to_toml(rules, "halves of q, k and v taken for heads"))
    rules_file = f"tensor_rules={tmp_path / 'wrong.toml'}"
    (verdict,) = verify(f"{NO_RULES}:packed", ["tp"], nproc=2, steps=1, set=[rules_file]).verdicts
    assert verdict.status == "failed"
    assert verdict.first is not None


GATHERED = {"column_gathered", "row_split"}


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("path", "job", "part", "styles"),
    [
        (NO_RULES, "packed", "attention", GATHERED),
        (NO_RULES, "packed", "mlp", {"column", "row"}),
        (NO_RULES, "mixer", "patches", {"column", "row"}),
        (UNRULED, "encoder", "linear", {"column", "row"}),
        (ARCHITECTURES, "bert", "attention", {"column", "row"}),
        (ARCHITECTURES, "gpt2", "attn", GATHERED),
        (ARCHITECTURES, "t5", "EncDecAttention", {"column", "row", "heads"}),
        (ARCHITECTURES, "t5", "SelfAttention", GATHERED),
        (ARCHITECTURES, "vit", "attention", {"column", "row"}),
        (FAMILIES, "gpt_neox", "attention", {"column", "row"}),
        (FAMILIES, "bloom", "attention", GATHERED),
        (FAMILIES, "opt", "self_attn", {"column", "row", "heads"}),
        (FAMILIES, "whisper", "encoder_attn", {"column", "row", "heads"}),
    ],
)
def test_rules_proposed_for_a_family_equal_one_process(path, job, part, styles):
    found = proposal(path, job)
    assert {style for pattern, style in found.rules.items() if part in pattern} == styles
    assert found.weakened == {}
    assert found.verdict.worst.relative < 1e-9


@pytest.mark.prove
def test_mamba_reads_parameters_of_other_modules_and_is_refused():
    found = proposal(FAMILIES, "mamba", steps=1)
    assert found.exit_code == 3
    assert "cannot read a parameter of another module" in found.summary
