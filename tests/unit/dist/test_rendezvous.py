"""Reading init_method."""

from pathlib import Path

import pytest

from refusals import refuses
from shardwise.dist.rendezvous import Rendezvous, parse_rendezvous


@pytest.mark.parametrize(
    ("text", "rdzv"),
    [
        ("env://", Rendezvous(scheme="env")),
        ("tcp://n0:29500", Rendezvous(scheme="tcp", host="n0", port=29500)),
        ("tcp://10.0.0.1:1", Rendezvous(scheme="tcp", host="10.0.0.1", port=1)),
        ("tcp://[::1]:29500", Rendezvous(scheme="tcp", host="::1", port=29500)),
        ("file:///scratch/a b?c#d%20", Rendezvous(scheme="file", path=Path("/scratch/a b?c#d%20"))),
    ],
)
def test_urls_are_read(text, rdzv):
    assert parse_rendezvous(text) == rdzv


@pytest.mark.parametrize("text", ["env://", "tcp://n0:29500", "tcp://[::1]:29500", "file:///scratch/store"])
def test_a_rendezvous_is_written_as_it_was_read(text):
    assert str(parse_rendezvous(text)) == text


@pytest.mark.parametrize(
    ("text", "code", "fix"),
    [
        ("tpc://n0:1", "rendezvous.unknown-scheme", "'tcp'"),
        ("http://n0:1", "rendezvous.unknown-scheme", "env, file, tcp"),
        ("n0:29500", "rendezvous.unknown-scheme", "env, file, tcp"),
        ("tcp://n0", "rendezvous.endpoint-invalid", "tcp://host:port"),
        ("tcp://:29500", "rendezvous.endpoint-invalid", "tcp://host:port"),
        ("tcp://n0:http", "rendezvous.endpoint-invalid", "tcp://host:port"),
        ("tcp://n0:99999", "rendezvous.endpoint-invalid", "tcp://host:port"),
        ("tcp://[::1:29500", "rendezvous.endpoint-invalid", "tcp://host:port"),
        ("tcp://n0:1?rank=0&world_size=2", "rendezvous.endpoint-invalid", "rank= and world_size="),
        ("tcp://n0:1/store", "rendezvous.endpoint-invalid", "tcp://n0:1"),
        ("file://store", "rendezvous.file-path-invalid", "file:///directory/file"),
        ("file://", "rendezvous.file-path-invalid", "file:///directory/file"),
        ("file:///scratch/", "rendezvous.file-path-invalid", "file:///directory/file"),
    ],
)
def test_malformed_urls_are_refused_with_what_to_write(text, code, fix):
    with refuses(code, repr(text)) as refused:
        parse_rendezvous(text)
    assert fix in refused.value.fix
