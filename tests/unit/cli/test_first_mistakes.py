"""The most likely mistakes of a first job file: one sentence that names the user's own field or module and the fix."""

import json

import pytest

from refusals import assert_refused
from shardwise.cli.main import main
from shardwise.hardware.probe import Gpu
from shardwise.planner import settle

pytestmark = pytest.mark.usefixtures("forked_parents")

HEAD = """
import torch
import shardwise as sw

rows = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.arange(32) % 3)


class Dictionaries(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"features": torch.ones(4), "labels": torch.tensor(index % 3)}


class Lists(Dictionaries):
    key, length = "labels", 4

    def __getitem__(self, index):
        return {"features": [1.0] * 4, self.key: [index % 3] * (1 + index % self.length)}


class Renamed(Lists):
    key, length = "label", 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, features):
        return self.linear(features)


class Attention(torch.nn.Module):
    def forward(self, features):
        heads = features[:, None, None, :]
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.5)[:, 0, 0]


class OnGpu(Net):
    def forward(self, features):
        return self.linear(features.cuda())


class Elsewhere(Net):
    def forward(self, features):
        return self.linear(features) + torch.zeros(3, device="meta")


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.head = torch.nn.Linear(4, 3)

    def forward(self, features):
        for layer in self.layers:
            features = layer(features)
        return self.head(features)


def make(**changes):
    fields = dict(
        model=Net, data=lambda split: rows if split == "train" else None, loss=sw.losses.cross_entropy,
        optimizer=sw.adamw(lr=1e-3), batch_size=8, steps=2,
    )
    return sw.Job(**{**fields, **changes})


def of(dataset):
    return lambda split: dataset if split == "train" else None


def labelled(target):
    return of(torch.utils.data.TensorDataset(torch.ones(32, 4), target))

"""

MISTAKES = {
    "loss given as a lambda": (
        "job = make(loss=lambda output, batch: output.sum())",
        [],
        ("job.loss-not-a-loss", "Job.loss", "sw.Loss.from_mean"),
    ),
    "loss of torch, which takes a mean": (
        "job = make(loss=torch.nn.CrossEntropyLoss())",
        [],
        ("job.loss-not-a-loss", "Job.loss", "sw.losses.cross_entropy"),
    ),
    "dict batch with a loss of tuples": (
        "job = make(data=of(Dictionaries()), forward=lambda model, batch: model(batch['features']))",
        [],
        ("loss.batch-is-dict", "features, labels", "cross_entropy", "sw.losses.labels"),
    ),
    "dict batch with keys that forward does not take": (
        "job = make(data=of(Dictionaries()), loss=sw.losses.labels)",
        [],
        ("job.forward-arguments", "Net.forward()", "'labels'", "Job(forward=lambda model, batch:"),
    ),
    "dict batch with label instead of labels": (
        "job = make(data=of(Renamed()), loss=sw.losses.labels)",
        [],
        ("loss.batch-without-labels", "features, label", 'rename_column("label", "labels")'),
    ),
    "tuple batch with a loss of dicts": (
        "job = make(loss=sw.losses.next_token)",
        [],
        ("loss.batch-without-labels", "list", 'dicts with "labels"'),
    ),
    "samples of Python lists": (
        "Lists.length = 1\njob = make(data=of(Lists()), loss=sw.losses.next_token)",
        [],
        ("loss.labels-not-tensor", 'with_format("torch")', "default_data_collator"),
    ),
    "inputs of Python lists": (
        "Lists.length = 1\njob = make(data=of(Lists()), forward=lambda model, batch: model(batch['features']))",
        [],
        ("data.samples-of-lists", 'with_format("torch")', "default_data_collator"),
    ),
    "samples of unequal lengths": (
        "job = make(data=of(Lists()), loss=sw.losses.labels)",
        [],
        ("data.samples-unequal", "DataCollatorWithPadding"),
    ),
    "metric of tuples on dict batches, before the first step": (
        """
metrics = {'accuracy': sw.metrics.token_accuracy}
forward = lambda model, batch: model(batch['features'])
job = make(data=lambda _: Dictionaries(), loss=sw.losses.labels, forward=forward, metrics=metrics)""",
        [],
        ("loss.batch-is-dict", "token_accuracy", "sw.metrics.label_accuracy"),
    ),
    "tied layers under pp": (
        "job = make(model=Tied)",
        ["--nproc", "2", "--plan", "pp"],
        ("support.pipeline-tied-weights", "layers.0.weight", "layers.3.weight"),
    ),
    "no tensor rules": (
        "job = make()",
        ["--nproc", "2", "--plan", "tp"],
        ("support.tp-no-rules", 'Job(tensor_rules={"linear":', "shardwise verify job.py --propose-rules"),
    ),
    "batch that does not divide": (
        "job = make()",
        ["--nproc", "3"],
        ("plan.batch-not-divisible", "batch_size 8", "6 or 9"),
    ),
    "missing extra": (
        "raise ModuleNotFoundError(\"No module named 'peft'\", name='peft')",
        [],
        ("job.file-raised", "'peft'", "pip install 'shardwise[hf]'"),
    ),
    "missing package": (
        "import a_package",
        [],
        ("job.file-raised", "'a_package'", "pip install a_package"),
    ),
    "data given as a list": (
        "job = make(data=[1, 2])",
        [],
        ("job.not-callable", "Job.data", "split"),
    ),
    "data given as a DataLoader": (
        "job = make(data=torch.utils.data.DataLoader(rows))",
        [],
        ("job.not-callable", "Job.data", "DataLoader", "split"),
    ),
    "data that returns a DataLoader": (
        "job = make(data=of(torch.utils.data.DataLoader(rows)))",
        [],
        ("data.dataloader-given", "Job.data", "'train'", "batch_size="),
    ),
    "optimizer that is finished": (
        "job = make(optimizer=torch.optim.SGD(Net().parameters(), lr=0.1))",
        [],
        ("job.not-callable", "Job.optimizer", "sw.adamw(lr=1e-3)"),
    ),
    "model that is finished": ("job = make(model=Net())", [], ("job.model-not-factory", "Job.model", "Net", "lambda:")),
    "wrong import path": (
        "from shardwise.train import Trainer",
        [],
        ("job.file-raised", "shardwise.train", "import shardwise as sw"),
    ),
    "name that sw does not have": ("sw.Jobs()", [], ("job.file-raised", "'Jobs'", "'Job'")),
    "job file without a job": ("work = make()", [], ("job.attribute-missing", "'job'", "job.py:work")),
    "labels that are floats": (
        "job = make(data=labelled(torch.zeros(32)))",
        [],
        ("loss.target-dtype", "Float", "Job.data", ".long()"),
    ),
    "labels beyond the classes": (
        "job = make(data=labelled(torch.full((32,), 7)))",
        [],
        ("loss.target-out-of-range", 7, "Job.model", "Job.data"),
    ),
    "tensor moved to a GPU by hand": (
        "job = make(model=OnGpu)",
        [],
        ("job.device-by-hand", "OnGpu.forward (job.py:", ".cuda()"),
    ),
    "tensor on another device": (
        "job = make(model=Elsewhere)",
        [],
        ("job.device-by-hand", "Elsewhere.forward (job.py:", "register_buffer"),
    ),
    "own hyperparameter as an option": (
        "def job(width: int = 3):\n    return make()",
        ["--width", "4"],
        ("", "--width", "--set width=VALUE"),
    ),
    "field of the plan in the job": (
        "job = make(accumulation=2)",
        [],
        ("job.file-raised", "accumulation", "--set accumulation=VALUE"),
    ),
    "training that is started by its own job file": (
        "job = make()\nsw.train('job.py', nproc=2)",
        [],
        ("job.trains-on-import", "job.py", 'if __name__ == "__main__":'),
    ),
}


@pytest.fixture
def refused(tmp_path, monkeypatch, capfd):
    """Return a function that runs a command on a job file and asserts that it refuses in one sentence."""
    monkeypatch.chdir(tmp_path)

    def run(text, arguments, refusal):
        (tmp_path / "job.py").write_text(HEAD + text)
        assert main(arguments) == 2
        written = capfd.readouterr().err
        assert "Traceback" not in written
        assert_refused(written, *refusal)
        assert not (tmp_path / "runs").exists()

    return run


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_explained_in_one_sentence(refused, mistake):
    text, options, refusal = MISTAKES[mistake]
    refused(text, ["train", "job.py", *options], refusal)


def test_more_processes_than_gpus_are_refused(refused, monkeypatch):
    gpu = Gpu(index=0, name="NVIDIA A100", memory_bytes=80 << 30, compute_capability=(8, 0))
    monkeypatch.setattr(settle, "probe_gpus", lambda: (gpu,))
    command = ["train", "job.py", "--nproc", "2"]
    refused("job = make()", command, ("launch.nproc-exceeds-gpus", "--nproc 2", 1, "--device cpu"))


@pytest.mark.parametrize(
    ("capability", "setting", "refusal"),
    [
        ((7, 0), "precision=float8", ("support.float8-device", "NVIDIA X", "7.0", "precision=fp16")),
        ((8, 0), "precision=float8", ("support.float8-device", "NVIDIA X", "8.0", "precision=bf16")),
        ((7, 0), "precision=bf16", ("support.bf16-device", "NVIDIA X", "7.0", "precision=fp16")),
        ((7, 0), "precision.optimizer=bf16", ("support.bf16-device", "NVIDIA X", "7.0")),
    ],
)
def test_precisions_that_a_gpu_lacks_are_refused_before_ranks_start(refused, monkeypatch, capability, setting, refusal):
    gpu = Gpu(index=0, name="NVIDIA X", memory_bytes=32 << 30, compute_capability=capability)
    monkeypatch.setattr(settle, "probe_gpus", lambda: (gpu,))
    refused("job = make()", ["train", "job.py", "--plan", "ddp", "--set", setting], refusal)


def test_dropout_inside_attention_is_named_by_verify(tmp_path, monkeypatch, capfd):
    """A plan that differs from one process is a finding, not an error: exit code 3."""
    monkeypatch.chdir(tmp_path)
    model = "torch.nn.Sequential(torch.nn.Linear(4, 4), Attention(), torch.nn.Linear(4, 3))"
    (tmp_path / "job.py").write_text(f"{HEAD}job = make(model=lambda: {model})")
    assert main(["verify", "job.py", "--plans", "ddp", "--nproc", "2", "--steps", "1", "--json"]) == 3
    [verdict] = json.loads(capfd.readouterr().out)["verdicts"]
    [finding] = verdict["findings"]
    assert finding["cause"] == "random numbers"
    assert finding["evidence"].startswith("1 ")  # the name of the module in the model
    assert 'Job(masks="keyed")' in finding["evidence"]
