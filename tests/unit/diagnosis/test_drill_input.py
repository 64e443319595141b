"""What cannot be drilled is refused before anything starts."""

import pytest

from refusals import refuses
from shardwise.cli.doctor import drill as command


@pytest.mark.parametrize(
    ("argv", "refusal"),
    [
        (["absent.py"], ("job.file-not-found", "absent.py")),
        (["--script", "absent.py"], ("launch.script-not-found", "absent.py")),
        (["job.py", "--drill", "kill"], ("cli.unexpected-argument", "'--drill'")),
        (["--set", "epochs=3", "job.py"], ("doctor.drill-length-set", "--set epochs=3")),
        (["--script", "--drill", "disk", "job.py"], ("cli.option-not-applicable", "--drill disk")),
        (["--script", "--plan", "fsdp", "job.py"], ("cli.option-not-applicable", "--plan")),
        (["--script", "--steps", "20", "job.py"], ("cli.option-not-applicable", "--steps")),
        (["--script", "--run-dir", ".", "job.py"], ("run.directory-not-empty", "--run-dir .")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused_and_nothing_is_made(tmp_path, monkeypatch, argv, refusal):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text("")
    with refuses(*refusal):
        command.main(argv, standalone_mode=False)
    assert [path.name for path in tmp_path.iterdir()] == ["job.py"]


def test_a_rank_of_another_launcher_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with refuses("cli.starts-own-ranks"):
        command.main(["job.py"], standalone_mode=False)
