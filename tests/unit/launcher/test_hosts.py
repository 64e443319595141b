"""Hosts are read as written; what cannot be read is refused with its place."""

import pytest

from refusals import refuses
from shardwise.cli.main import main
from shardwise.errors import LaunchError
from shardwise.launcher.spec import SubmitSpec
from shardwise.launcher.ssh.run import HostSpec, read_hosts
from shardwise.runner.remote import forwarded_variables


def test_a_list_is_read_in_order():
    assert read_hosts("a,me@b:8, [fe80::1%eth0]:2") == (
        HostSpec(name="a"),
        HostSpec(name="b", user="me", slots=8),
        HostSpec(name="fe80::1%eth0", slots=2),
    )


def test_a_file_is_read_line_by_line(tmp_path):
    (tmp_path / "hosts").write_text("# all\na:4\n\nb slots=8 port=2222 user=me  # new\n")
    assert read_hosts(str(tmp_path / "hosts")) == (
        HostSpec(name="a", slots=4),
        HostSpec(name="b", user="me", port=2222, slots=8),
    )


def test_a_hostfile_of_deepspeed_is_read(tmp_path):
    (tmp_path / "hostfile").write_text("worker-1 slots=4\n# down for repair\n#worker-2 slots=4\n\nworker-3   slots=4\n")
    assert read_hosts(str(tmp_path / "hostfile")) == (
        HostSpec(name="worker-1", slots=4),
        HostSpec(name="worker-3", slots=4),
    )


def test_who_types_deepspeeds_option_for_a_hostfile_is_refused_with_ours(capsys):
    assert main(["launch", "--hostfile", "hostfile", "train.py"]) == 2
    assert "--hosts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        ("-oProxyCommand=x", ("launch.host-invalid", "-oProxyCommand=x")),
        ("a:b", ("launch.host-invalid", "'a:b'")),
        ("a slots=none", ("launch.host-number-invalid", "slots", "'none'", "1 to 4096")),
        ("a port=99999", ("launch.host-number-invalid", "port", "'99999'")),
        ("a 8", ("launch.hostfile-syntax", "'8'")),
        ("a slot=8", ("launch.hostfile-unknown-key", "'slot'", "'slots'")),
        ("a:8 slots=8", ("launch.hostfile-key-repeated", "slots")),
        ("a:0", ("launch.host-number-invalid", "slots of a", "'0'")),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, refusal):
    (tmp_path / "hosts").write_text(f"first\n{line}\n")
    with refuses(*refusal, "line 2"):
        read_hosts(str(tmp_path / "hosts"))


@pytest.mark.parametrize("text", ["", ",", "a,,b", "a b"])
def test_a_list_with_no_host_in_some_place_is_refused(text):
    with pytest.raises(LaunchError):
        read_hosts(text)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--hosts", "a:4,b:8"], "4 on a and 8 on b"),
        (["--hosts", "a,b:8", "--nproc", "2"], "2 on a and 8 on b"),
        (["--hosts", "a,b:2"], "1 on a and 2 on b"),
    ],
)
def test_train_refuses_hosts_of_different_size_before_it_connects(capsys, argv, sentence):
    assert main(["train", *argv, "job.py"]) == 2
    output = capsys.readouterr().err
    assert sentence in output
    assert "on every host" in output


def test_variables_of_libraries_and_those_of_env_reach_every_host():
    environ = {"HF_HOME": "/hf", "CUDA_HOME": "/cuda", "CUDA_VISIBLE_DEVICES": "0", "MY_KEY": "k", "OTHER": "o"}
    environ |= {"HF_TOKEN": "t", "WANDB_API_KEY": "k"}  # credentials are sent only by --env
    found = forwarded_variables(environ, ("MY_KEY", "MODE=a=b"))
    assert found == {"HF_HOME": "/hf", "CUDA_HOME": "/cuda", "MY_KEY": "k", "MODE": "a=b"}
    for text in ("UNSET", "=x"):
        with refuses("launch.env-not-set", text, kind=LaunchError):
            forwarded_variables(environ, (text,))
    with refuses("cli.option-not-applicable", "MY_KEY", kind=LaunchError) as refused:
        SubmitSpec(env=("MY_KEY=secret",))
    assert "secret" not in str(refused.value)
