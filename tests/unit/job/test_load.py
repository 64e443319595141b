import pytest

from refusals import refuses
from shardwise.job import load_job, refer

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


def test_attribute_that_is_no_job_is_refused(job_file):
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
def test_file_that_does_not_import_says_where(tmp_path, text, refusal):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with refuses(*refusal):
        load_job(refer(str(path), {}))


def test_missing_file_is_refused():
    with refuses("job.file-not-found", "nowhere.py"):
        refer("nowhere.py", {})
