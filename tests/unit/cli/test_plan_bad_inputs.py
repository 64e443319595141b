"""Bad input of `shardwise plan`: one sentence with the value, the fact and the fix, exit code 2, nothing written."""

import json

import pytest

from refusals import assert_refused
from shardwise.cli.main import main

JOB = """
import torch
import shardwise as sw

job = sw.Job(
    model=lambda: torch.nn.Linear(4, 2), data=lambda split: [(torch.zeros(4), 0)] * 8,
    loss=sw.losses.cross_entropy, optimizer=sw.sgd(lr=0.1), batch_size=8, steps=1,
)
"""
LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
FILES = {
    "job.py": JOB,
    "plan.toml": 'version = 1\nlayout = "shard8"\nzero = 3\nmicro_batch = 8\n',
    "named.toml": '# model = gpt2\n# cluster = 8xH100\nversion = 1\nlayout = "shard8"\nzero = 3\n',
    "length.toml": '# model = gpt2\n# length = long\nversion = 1\nlayout = "shard8"\nzero = 3\n',
    "typo.toml": "version = 1\nmicro_bach = 2\n",
    "broken.toml": "version = = 1\n",
    "broken.json": "{",
    "list.json": "[]",
    "nested.json": "[" * 100_000,
    "bloom.json": json.dumps(LLAMA | {"model_type": "bloom"}),
    "mixtral.json": json.dumps(LLAMA | {"model_type": "mixtral"}),
    "few.json": json.dumps({"model_type": "llama", "vocab_size": 512}),
    "heads.json": json.dumps(LLAMA | {"num_attention_heads": 5}),
    "text.json": json.dumps(LLAMA | {"hidden_size": "wide"}),
    "window.json": json.dumps(LLAMA | {"model_type": "mistral", "sliding_window": 64}),
    "deep.json": json.dumps(LLAMA | {"num_hidden_layers": 10**9}),
    "bytes.toml": b"\xff\xfe\x00",
}
GPT2 = ["gpt2", "--cluster", "8xH100"]
MODELS = {
    "no model": (["--cluster", "8xH100"], ("plan.nothing-named", "published model")),
    "unknown model": (["lama-7b"], ("model.unknown-name", "'llama-7b'")),
    "name of the hub": (["meta-llama/Llama-3-8B"], ("model.unknown-name", "config.json")),
    "missing job": (["nowhere.py"], ("job.file-not-found", "nowhere.py")),
    "missing attribute": (["job.py:other", "--cluster", "2xH100"], ("job.attribute-missing", "'other'")),
    "missing config": (["no/config.json"], ("model.config-read-failed", "no/config.json")),
    "folder without a config": (["."], ("model.config-read-failed", "config.json")),
    "config that is not JSON": (["broken.json"], ("model.config-not-json", "broken.json")),
    "config of brackets": (["nested.json"], ("model.config-not-json", "nested.json")),
    "config that is a list": (["list.json"], ("model.config-not-json", "list")),
    "unknown architecture": (["bloom.json"], ("model.config-not-described", "'bloom'", "qwen2")),
    "mixture of experts": (["mixtral.json"], ("model.config-experts", "'mixtral'")),
    "missing fields": (["few.json"], ("model.config-field-missing", "hidden_size", "num_hidden_layers")),
    "heads that do not divide": (["heads.json"], ("model.width-not-divisible", "heads.json", 64, 5)),
    "field of another type": (["text.json"], ("model.setting-not-positive", "text.json", "'wide'")),
    "more layers than any model has": (["deep.json"], ("model.too-many-layers", "deep.json", "1,000,000,000")),
    "window shorter than samples": (["window.json"], ("model.sliding-window", 64, 128)),
    "adapters of a convolution": (["resnet-50", "--lora", "8"], ("model.no-linear-modules", "resnet-50")),
    "samples beyond the context": (["gpt2", "--length", "2048"], ("model.context-exceeded", 1024, 2048)),
    "length of images": (["resnet-50", "--length", "10"], ("cli.option-not-applicable", "--length 10", "resnet-50")),
    "length of a job": (["job.py", "--length", "8"], ("cli.option-not-applicable", "--length", "job.py")),
}
CLUSTERS = {
    "no GPUs": ("0xH100", ("hardware.cluster-count-invalid", "0")),
    "fewer than no GPUs": ("-8xH100", ("hardware.cluster-count-invalid", "-8")),
    "count without x": ("8H100", ("hardware.cluster-syntax", "8xH100")),
    "mixed": ("4xA100+4xH100", ("hardware.cluster-mixed", "4xA100")),
    "mixed by a comma": ("4xA100,4xH100", ("hardware.cluster-mixed", "4xA100")),
    "comma at the end": ("8xH100,", ("hardware.cluster-syntax", "8xH100,", "8xH100")),
    "plus without a second": ("+8xH100", ("hardware.cluster-syntax", "8xH100")),
    "only a comma": (",", ("hardware.cluster-empty",)),
    "unknown device": ("8xH1000", ("hardware.unknown-device", "'H1000'", "'h100'")),
    "part of a node": ("9xH100", ("hardware.cluster-partial-node", 8, 16)),
    "three counts": ("2x2x2xH100", ("hardware.cluster-syntax", "2x2x2xH100")),
    "nothing": ("", ("hardware.cluster-empty",)),
    "count of a node": ("2x4xp4d.24xlarge", ("hardware.cluster-second-count", 8)),
}
PLANS = {
    "unknown preset": ([*GPT2, "--plan", "fspd"], ("plan.unknown-preset", "'fsdp'")),
    "product for other ranks": ([*GPT2, "--plan", "shard2.tp2"], ("layout.world-size-mismatch", 4, 8)),
    "unknown axis": ([*GPT2, "--plan", "pp2.sharded4"], ("layout.unknown-axis", "'shard'")),
    "odd hsdp": (["gpt2", "--cluster", "3xH100", "--plan", "hsdp"], ("plan.hsdp-world-size", 3)),
    "missing plan file": ([*GPT2, "--plan", "none.toml"], ("plan.read-failed", "none.toml")),
    "plan file for other ranks": (
        ["gpt2", "--cluster", "4xH100", "--plan", "plan.toml"],
        ("plan.world-size-mismatch", 8, 4, "--cluster 8xH100"),
    ),
    "plan file for another batch": (
        [*GPT2, "--plan", "plan.toml", "--batch-size", "48"],
        ("plan.batch-not-divisible", 48),
    ),
    "plan file of no model": (["plan.toml"], ("plan.file-without-model", "plan.toml", "--plan plan.toml")),
    "plan file with a typo": (["typo.toml"], ("plan.unknown-key", "'micro_batch'")),
    "plan file that is not TOML": (["broken.toml"], ("plan.not-toml", "broken.toml")),
    "plan file of bytes": (["bytes.toml"], ("plan.read-failed", "bytes.toml", "UTF-8")),
    "plan of bytes": ([*GPT2, "--plan", "bytes.toml"], ("plan.read-failed", "bytes.toml", "UTF-8")),
    "plan file of a long model": (["length.toml"], ("spec.value-invalid", "'long'")),
    "two plans": (["named.toml", "--plan", "fsdp"], ("cli.options-conflict", "named.toml")),
    "batch below the ranks": ([*GPT2, "--plan", "ddp", "--batch-size", "4"], ("plan.batch-too-small", 4, 8)),
    "batch that does not divide": ([*GPT2, "--plan", "ddp", "--batch-size", "12"], ("plan.batch-not-divisible", 12)),
    "typo in a key": ([*GPT2, "--set", "recompte=full"], ("cli.set-unknown-key", "'recompute'")),
    "unknown key of a section": ([*GPT2, "--set", "offload.disk=cpu"], ("cli.set-unknown-key", "offload.disk")),
    "key without a value": ([*GPT2, "--set", "recompute"], ("cli.set-syntax", "key=value")),
    "unknown choice": ([*GPT2, "--set", "recompute=some"], ("plan.unknown-choice", "'some'")),
    "section by --set": ([*GPT2, "--set", "offload=cpu"], ("plan.not-a-section", "offload=cpu", "optimizer")),
    "float8 on an old GPU": (
        ["gpt2", "--cluster", "2xA100", "--set", "precision=float8"],
        ("support.float8-device", "8.0"),
    ),
    "float8 of a preset": (
        ["gpt2", "--cluster", "2xA100", "--plan", "fsdp", "--set", "precision=float8"],
        ("support.float8-device", "A100"),
    ),
    "bf16 on an old GPU": (["gpt2", "--cluster", "2xV100", "--precision", "bf16"], ("support.bf16-device", "V100")),
    "layout by --set": ([*GPT2, "--set", "layout=tp8"], ("cli.set-layout", "--plan tp8")),
    "field of a job": ([*GPT2, "--set", "optimizer.lr=1"], ("cli.set-unknown-key", "optimizer.lr")),
    "batch by --set": ([*GPT2, "--set", "batch_size=8"], ("cli.set-unknown-key", "--batch-size 8")),
    "typo in a key of a job": (["job.py", "--set", "batchsize=8"], ("cli.set-unknown-key", "'batch_size'")),
    "micro-batch of nothing": ([*GPT2, "--set", "micro_batch=0"], ("plan.not-whole-number", "micro_batch")),
    "compiled twice": (
        [*GPT2, "--compile", "blocks", "--set", "compile=none"],
        ("cli.options-conflict", "compile=none"),
    ),
    "another precision": (
        [*GPT2, "--plan", "plan.toml", "--precision", "bf16"],
        ("cli.options-conflict", "fp32", "bf16"),
    ),
}
NUMBERS = {
    "no samples": (["--batch-size", "0"], ("", "--batch-size", "0")),
    "fewer than no samples": (["--batch-size", "-4"], ("", "--batch-size", "-4")),
    "more samples than any step has": (["--batch-size", f"{10**23}"], ("plan.batch-too-large", f"{10**23:,}")),
    "half a sample": (["--batch-size", "1.5"], ("", "--batch-size", "1.5")),
    "no tokens in a sample": (["--length", "0"], ("", "--length", "0")),
    "unknown precision": (["--precision", "bf8"], ("", "--precision", "'bf8'")),
    "unknown compile": (["--compile", "everything"], ("", "--compile", "'everything'")),
    "memory without a number": (["--max-memory", "much"], ("plan.max-memory-invalid", "'much'", "60GB")),
    "memory in bytes": (["--max-memory", "60"], ("plan.max-memory-invalid", 60, "60GB")),
    "more memory than a device has": (["--max-memory", "200GB"], ("plan.max-memory-invalid", "200GB", "H100")),
    "negative memory": (["--max-memory", "-1GB"], ("plan.max-memory-invalid", "-1GB")),
    "no GPUs": (["--max-gpus", "0"], ("", "--max-gpus", "0")),
    "more GPUs than the cluster": (["--max-gpus", "16"], ("cli.options-conflict", 16, 8)),
    "a plan for any number of GPUs": (["--max-gpus", "4", "--plan", "fsdp"], ("cli.options-conflict", "fsdp")),
    "a plan of another engine": (["--engine", "deepspeed", "--plan", "fsdp"], ("cli.options-conflict", "deepspeed")),
    "tokens without a number": (["--tokens", "lots"], ("plan.tokens-invalid", "'lots'", "1T")),
    "negative tokens": (["--tokens", "-1T"], ("plan.tokens-invalid", "'-1T'")),
    "negative price": (["--tokens", "1T", "--price", "-2"], ("", "--price", "-2")),
    "infinite price": (["--tokens", "1T", "--price", "inf"], ("plan.price-invalid", "inf")),
    "price of nothing": (["--price", "2"], ("cli.option-not-applicable", "--price", "--tokens")),
    "unknown option": (["--max-gpu", "4"], ("", "--max-gpu", "--max-gpus")),
    "out in no directory": (["--out", "no/plan.toml"], ("cli.output-folder-missing", "no/plan.toml")),
    "report in no directory": (["--report", "no/page.html"], ("cli.output-folder-missing", "no/page.html")),
    "report that is not a page": (["--report", "page.pdf"], ("cli.report-extension", "page.html")),
    "picture that is not an SVG": (["--picture", "plan.png"], ("cli.picture-extension", "plan.png", "plan.svg")),
    "ranks of a search": (["--nproc", "2"], ("cli.option-not-applicable", "--cluster 2xthis")),
}
INPUTS = {
    **{f"model: {name}": refusal for name, refusal in MODELS.items()},
    **{f"cluster: {name}": (["gpt2", "--cluster", text], refusal) for name, (text, refusal) in CLUSTERS.items()},
    **{f"plan: {name}": refusal for name, refusal in PLANS.items()},
    **{f"option: {name}": ([*GPT2, *more], refusal) for name, (more, refusal) in NUMBERS.items()},
}


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, text in FILES.items():
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path


@pytest.mark.parametrize(("arguments", "refusal"), INPUTS.values(), ids=INPUTS)
def test_bad_input_is_one_sentence_and_writes_nothing(directory, capfd, arguments, refusal):
    more = [] if "--out" in arguments else ["--out", "written.toml"]
    assert main(["plan", *arguments, *more]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1, captured.err
    assert_refused(captured.err, *refusal)
    assert {path.name for path in directory.iterdir()} - {"__pycache__", "cache"} == set(FILES)


@pytest.mark.parametrize("option", ["--out", "--picture", "--report"])
def test_a_file_that_cannot_be_written_is_one_sentence_after_the_report(directory, capfd, option):
    name = "full.svg" if option == "--picture" else "full.html"
    (directory / name).symlink_to("/dev/full")  # accepts no byte, not even of root
    assert main(["plan", "gpt2", "--cluster", "2xH100", "--batch-size", "8", option, name]) == 2
    captured = capfd.readouterr()
    assert "gpt2" in captured.out
    assert_refused(captured.err, "cli.output-write-failed", name)
    assert len(captured.err.strip().splitlines()) == 1
