"""The Specs of bench: one field makes the option, the parameter and the JSON key; `sw.bench` takes any of them."""

import json

import pytest

import shardwise as sw
from refusals import refuses
from shardwise.errors import LaunchError
from shardwise.measurement.specs import CommSpec, OverlapSpec, P2pSpec, PlaceSpec, ScalingSpec, StepSpec
from shardwise.spec import Spec


@pytest.mark.parametrize(
    "spec",
    [
        CommSpec.of(["all_reduce"], also_async=True, backend="GLOO"),
        P2pSpec.of(way=["send"], nproc=2),
        OverlapSpec.of("job.py", buckets="1,5", set=["batch_size=8"]),
        ScalingSpec.of("train.py", ("--lr", "1"), ranks="1,2"),
        StepSpec.of("job.py", fake_world=4, device="cuda:0"),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_a_spec_travels_as_json(spec):
    assert type(spec).from_json(spec.to_json()) == spec


def test_backend_mpi_implies_the_cpu_and_refuses_a_gpu():
    assert PlaceSpec(backend="MPI").device == "cpu"
    with refuses("world.backend-device-mismatch", "--device cuda", kind=LaunchError):
        PlaceSpec(backend="mpi", device="cuda")


def test_a_part_that_does_not_exist_is_refused_with_the_nearest():
    with refuses("bench.unknown-part", "'com'", "'comm'"):
        sw.bench("com")
    with refuses("bench.unknown-part", "CommSpec"):
        sw.bench(Spec())


def test_bench_is_a_function_that_returns_a_report_with_one_renderer_for_each_form(job_file, tmp_path):
    report = sw.bench("step", str(job_file), plan="zero3", fake_world=2, steps=1, device="cpu")
    assert report.exit_code == 0
    assert json.loads(report.to_json())["measured"][0]["world_size"] == 2
    assert "rank 0 of 2 (fake world)" in report.to_text()
    report.write(tmp_path / "report.md")
    assert "peak memory" in (tmp_path / "report.md").read_text()
