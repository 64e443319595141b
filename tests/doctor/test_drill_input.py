"""What cannot be drilled is refused before anything starts."""

import pytest

from shardwise.cli.doctor_drill import command
from shardwise.errors import InputError


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent.py"], "job file absent.py is not there"),
        (["--script", "absent.py"], "script absent.py is not there"),
        (["job.py", "--drill", "kill"], "takes no argument '--drill'"),
        (["--set", "epochs=3", "job.py"], "--set epochs=3 is the length of the job"),
        (["--script", "--drill", "disk", "job.py"], "--drill disk is about checkpoints of a job"),
        (["--script", "--plan", "fsdp", "job.py"], "--plan is for a job"),
        (["--script", "--steps", "20", "job.py"], "--steps is for a job"),
        (["--script", "--run-dir", ".", "job.py"], "--run-dir . is not empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_and_nothing_is_made(tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("")
    with pytest.raises(InputError) as raised:
        command.main(words, standalone_mode=False)
    assert said in raised.value.fact
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_a_rank_of_another_launcher_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="drills start their own ranks"):
        command.main(["job.py"], standalone_mode=False)
