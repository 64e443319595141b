from pathlib import Path

import pytest
import torch

from refusals import refuses
from shardwise.job import load_job, refer
from shardwise.job.load import job_parameters
from shardwise.planner.settle import split_settings

GOOD = """
import shardwise as sw
from sibling import SIZE
job = sw.Job(model=lambda: None, data=sw.datasets.digits, loss=sw.losses.cross_entropy,
             optimizer=sw.sgd(lr=1), batch_size=SIZE, epochs=1)
other = 3
"""


@pytest.fixture
def job_file(tmp_path):
    (tmp_path / "sibling.py").write_text("SIZE = 8")
    path = tmp_path / "my-job.py"
    path.write_text(GOOD)
    return path


def test_job_file_sees_its_siblings_and_overrides(job_file):
    assert load_job(refer(str(job_file), {"batch_size": "4"})).batch_size == 4


def test_file_changed_between_launch_and_load_is_refused(job_file):
    reference = refer(str(job_file), {})
    job_file.write_text(GOOD + "\n# changed")
    with refuses("job.file-changed", "my-job.py"):
        load_job(reference)


def test_missing_attribute_names_the_nearest_job(job_file):
    with refuses("job.attribute-missing", "'job'"):
        load_job(refer(f"{job_file}:jobb", {}))


def test_attribute_that_is_not_a_job_is_refused(job_file):
    with refuses("job.not-a-job", "other", "int"):
        load_job(refer(f"{job_file}:other", {}))


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("x = 1\ny = 1 / 0", ("job.file-raised", "ZeroDivisionError", 2)),
        ("def f(:", ("job.file-raised", "SyntaxError", 1)),
        ("import no_such_thing", ("job.file-raised", "ModuleNotFoundError", 1)),
        ("", ("job.attribute-missing", "job = sw.Job")),
        ("import shardwise as sw\nsw.Job(batchsize=3)", ("job.file-raised", "'batch_size'")),
    ],
)
def test_file_that_does_not_import_names_the_place(tmp_path, text, refusal):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with refuses(*refusal):
        load_job(refer(str(path), {}))


def test_missing_file_is_refused():
    with refuses("job.file-not-found", "nowhere.py"):
        refer("nowhere.py", {})


MADE = """
from pathlib import Path
from typing import Literal
import functools
import torch
import shardwise as sw

def sgd(named, lr=0.1, momentum=0.0):
    return torch.optim.SGD(named, lr=lr, momentum=momentum)

def made(optimizer, **options):
    return sw.Job(model=lambda: torch.nn.Linear(2, options.get("width", 2)), data=lambda split: options,
                  loss=sw.losses.cross_entropy, optimizer=optimizer, batch_size=8, steps=2)

def job(width: int = 256, data: str = "x.txt", rate: float = 1.0, warm: bool = False,
        kind: Literal["a", "b"] = "a", folder: Path | None = None, untyped=3, free=None) -> sw.Job:
    return made(sgd, **locals())

def required(width: int) -> sw.Job:
    return made(sgd, width=width)

def reserved(batch_size: int = 3) -> sw.Job:
    return made(sgd)

def reserved_by_plan(micro_batch: int = 3) -> sw.Job:
    return made(sgd)

def nothing():
    pass

def raising(width: int = 1) -> sw.Job:
    raise ValueError(width)

partial = made(functools.partial(torch.optim.AdamW, lr=0.1))
adamw = made(sw.adamw(lr=0.1))
by_class = made(torch.optim.Adam)
by_lambda = made(lambda named: torch.optim.SGD(named, lr=0.1))
by_options = made(lambda named, **options: torch.optim.SGD(named, **options))
"""


@pytest.fixture
def made(tmp_path):
    """Return a function that loads a job of MADE with settings, as the command line does."""
    path = tmp_path / "made.py"
    path.write_text(MADE)

    def load(attribute="job", *settings):
        return load_job(split_settings(f"{path}:{attribute}", settings)[0])

    return load


def test_parameters_of_a_job_function_are_typed_and_overridden(made):
    assert made().data("train")["width"] == 256
    settings = ["width=8", "data=3", "rate=2", "warm=true", "kind=b", "folder=here", "untyped=4", "free=[1, 2]"]
    job = made("job", *settings, "batch_size=16", "optimizer.lr=0.5")
    assert job.data("train") == {
        "width": 8, "data": "3", "rate": 2.0, "warm": True, "kind": "b", "folder": Path("here"), "untyped": 4,
        "free": [1, 2],
    }  # fmt: skip
    assert (job.batch_size, job.model().out_features) == (16, 8)
    assert made("required", "width=8").model().out_features == 8


def test_parameters_are_found_without_an_import(tmp_path):
    path = tmp_path / "made.py"
    path.write_text(MADE + "1 / 0")
    assert job_parameters(f"{path}:required") == {"width"}
    assert job_parameters(f"{path}:adamw") == job_parameters("nowhere.py") == frozenset()


@pytest.mark.parametrize(
    ("attribute", "settings", "refusal"),
    [
        ("job", ["widht=3"], ("cli.set-unknown-key", "'width'")),
        ("job", ["lr=3"], ("cli.set-unknown-key", "'optimizer.lr'")),
        ("job", ["width=wide"], ("job.parameter-type", "width=wide", "int")),
        ("job", ["kind=c"], ("job.parameter-type", "kind=c")),
        ("required", [], ("job.parameter-missing", "'width'", "--set width=VALUE")),
        ("reserved", [], ("job.parameter-reserved", "'batch_size'", "Job", "my_batch_size")),
        ("reserved_by_plan", ["micro_batch=4"], ("job.parameter-reserved", "'micro_batch'", "Plan")),
        ("nothing", [], ("job.not-a-job", "nothing")),
        ("raising", ["width=7"], ("job.file-raised", "ValueError", 7)),
        ("by_lambda", ["optimizer.lr=1"], ("cli.set-no-fields", "Job.optimizer", "'lr'", "functools.partial")),
        ("partial", ["optimizer.momentum=1"], ("cli.set-no-fields", "Job.optimizer", "'momentum'")),
    ],
)
def test_hyperparameters_that_do_not_exist_are_refused(made, attribute, settings, refusal):
    with refuses(*refusal):
        made(attribute, *settings)


@pytest.mark.parametrize("attribute", ["job", "partial", "adamw", "by_class", "by_options"])
def test_learning_rate_of_any_factory_with_that_keyword_is_set(made, attribute):
    optimizer = made(attribute, "optimizer.lr=0.25").optimizer(torch.nn.Linear(2, 2).named_parameters())
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}
