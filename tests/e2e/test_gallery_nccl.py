"""Chapter 4 of the gallery and the benchmarks: the commands of their READMEs run, and ranks do what is drawn there."""

import importlib
import json
import re
import shlex

import pytest
import torch
import torch.distributed as dist

from e2e.gallery import EXAMPLES, FORKED, Chapter, finish
from shardwise.cli.bench import command
from shardwise.testing import run_ranks

pytestmark = pytest.mark.timeout(240)

CHAPTER = Chapter(EXAMPLES / "04-nccl-operations")
BENCHMARKS = Chapter(EXAMPLES / "benchmarks")
FORMS = [
    (path.parent.name, line)
    for path in sorted(EXAMPLES.glob("*/README.md"))
    for line in Chapter(path.parent).commands("shardwise bench")
]
SUB_GROUP = "all_reduce(group=new_group(...))"


@pytest.fixture
def script(monkeypatch):
    """Import a script of the chapters."""
    for chapter in (CHAPTER, BENCHMARKS):
        monkeypatch.syspath_prepend(chapter.folder)
    return importlib.import_module


def drawings(output: str) -> list[str]:
    return [block[block.index("Before:") :] for block in output.split("\n\n") if "After " in block]


def shown(chapter: Chapter) -> str:
    """Return the README's text with the lines of its blocks as they are printed: nothing behind them."""
    return re.sub(r" +$", "", chapter.readme, flags=re.MULTILINE)


@pytest.mark.slow
def test_collectives_are_drawn_in_the_readme_as_two_ranks_print_them(tmp_path, launched):
    for line in launched(CHAPTER.commands("per_node=2 collective_ops.py")[:1]):
        output = CHAPTER.run(line, tmp_path)
        drawn = drawings(output)
        assert len(drawn) == 12
        assert [block for block in drawn if SUB_GROUP not in block and block not in shown(CHAPTER)] == []
        assert "rank 0 alone has called all_reduce: is_completed() False" in output


@pytest.mark.prove
def test_four_ranks_draw_the_sub_group_and_the_operations_of_the_readme(tmp_path):
    lines = CHAPTER.commands("per_node=4 collective_ops.py")
    assert len(lines) == 2
    for line in lines:
        output = CHAPTER.run(line, tmp_path)
        [sub_group] = [block for block in drawings(output) if SUB_GROUP in block]
        assert sub_group in shown(CHAPTER)
        assert output[output.index("all_reduce of [rank + 1, 6]") :].strip() in shown(CHAPTER)


@pytest.mark.parametrize("nproc", [1, 3, 4])
def test_every_collective_asserts_itself_on_any_number_of_ranks(nproc, script):
    chapter, ranks = script("collective_ops"), script("ranks")

    def body(world):
        me = ranks.Me(world.rank, world.size, world.device, dist.new_group(backend="gloo"))
        drawn = {name: ranks.plain(example(me)[1]) for name, example in chapter.EXAMPLES.items()}
        return drawn, [name for name in chapter.OPERATIONS if chapter.reduced(me, name) is None]

    results = run_ranks(body, nproc)
    assert [missing for _, missing in results] == [["PREMUL_SUM"]] * nproc
    if nproc == 4:
        assert [drawn[SUB_GROUP] for drawn, _ in results] == [[9, 12]] * 3 + [[7, 8]]


def test_detail_names_each_mismatch_but_that_of_reduce_operations(script):
    chapter, ranks = script("collective_ops"), script("ranks")

    def body(world):
        me = ranks.Me(world.rank, world.size, world.device, dist.group.WORLD)
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        return {name: chapter.detected(me, name) for name in chapter.MISMATCHES}

    guide = (CHAPTER.folder / "nccl_debugging.md").read_text()
    for name, line in run_ranks(body, 2)[0].items():
        assert f"{name:<18}{line}\n" in guide
        assert ("mismatch" in line) == (name != "reduce operation")


def test_mismatches_without_detail_are_not_run(script):
    chapter, ranks = script("collective_ops"), script("ranks")

    def body(world):
        with pytest.raises(SystemExit):
            chapter.show_mismatches(ranks.Me(world.rank, world.size, world.device, dist.group.WORLD))

    run_ranks(body, 2)


def test_a_wrong_sum_is_noticed(script):
    chapter, ranks = script("collective_ops"), script("ranks")

    def body(world):
        me = ranks.Me(world.rank, world.size, world.device, dist.group.WORLD)
        real = dist.all_reduce
        dist.all_reduce = lambda tensor, **options: real(tensor.add_(1), **options)
        with pytest.raises(AssertionError):
            chapter.all_reduce(me)
        dist.all_reduce = real

    run_ranks(body, 2)


@pytest.mark.slow
def test_point_to_point_draws_every_way_and_its_naive_ring_hangs(tmp_path, launched):
    lines = CHAPTER.commands("point_to_point.py", "--deadlock")
    assert len(lines) == 1
    for line in launched(lines):
        output = CHAPTER.run(line, tmp_path)
        assert [re.search(r"After (.*):$", block.splitlines()[0])[1] for block in drawings(output)] == [
            "send(dst=1), recv(src=0)",
            "isend(dst=1), irecv(src=0)",
            "recv(tag=2), recv(tag=1)",
            "irecv(tag=2), irecv(tag=1)",
            "recv() of any source",
            "irecv() of any source",
            "ring, even ranks send first",
            "ring, isend, then recv",
            "ring, batch_isend_irecv",
        ]
        assert output.splitlines()[-1] in CHAPTER.readme


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_rings_of_odd_and_even_size_go_round(nproc, script):
    chapter, ranks = script("point_to_point"), script("ranks")

    def body(world):
        me = ranks.Me(world.rank, world.size, world.device, dist.new_group(backend="gloo"))
        for example in (chapter.irecv_tags, chapter.any_source, chapter.irecv_any_source):
            example(me)
        return [ranks.plain(chapter.ring_all_gather(me, shift)) for shift in chapter.RINGS.values()]

    whole = [[2 * rank + 1, 2 * rank + 2] for rank in range(nproc)]
    assert run_ranks(body, nproc) == [[whole] * 3] * nproc


@pytest.mark.slow
def test_bandwidth_test_prints_every_collective_and_no_wrong_number(tmp_path, launched):
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"]
    row = re.compile(r"^(\w+) +([\d,]+) +[\d.]+ +([\d.]+) +([\d.]+) +(\d+)$", re.MULTILINE)
    assert [found[0] for found in row.findall(CHAPTER.readme)] == [name for name in names for _ in range(3)]
    for line in launched(CHAPTER.commands("bandwidth_test.py")):
        output = CHAPTER.run(f"{line} --largest 1 --calls 2", tmp_path)
        rows = row.findall(output)
        assert [found[0] for found in rows] == [name for name in names for _ in range(3)]
        assert {found[-1] for found in rows} == {"0"}
        assert re.search(r"GB/s, 1,048,576 bytes +rank 0\n +rank 1 +[\d.]+$", output, re.MULTILINE)


def test_bandwidth_test_counts_bytes_and_wrong_numbers(script):
    bandwidth, ranks = script("bandwidth_test"), script("ranks")

    def body(world):
        me = ranks.Me(world.rank, world.size, world.device, dist.new_group(backend="gloo"))
        found = {}
        for name in [name for name in bandwidth.FACTORS if name != "send"]:
            collective = bandwidth.prepare(name, 48, me)
            found[name] = (collective.num_bytes, bandwidth.wrong_numbers(collective, me))
        collective = bandwidth.prepare("broadcast", 48, me)
        collective.expected[me.rank] = 7  # one wrong number on each rank
        return found, bandwidth.wrong_numbers(collective, me)

    for found, wrong in run_ranks(body, 3):
        assert set(found.values()) == {(48, 0)}
        assert wrong == 3


def test_bus_bandwidth_factors_are_those_of_nccl_tests(script):
    factors = script("bandwidth_test").FACTORS
    assert {name: factor(4) for name, factor in factors.items()} == {
        "all_reduce": 1.5,
        "all_gather": 0.75,
        "reduce_scatter": 0.75,
        "all_to_all": 0.75,
        "broadcast": 1.0,
        "reduce": 1.0,
        "send": 1.0,
    }


@pytest.mark.slow
def test_distributed_benchmarks_prints_communication_and_training(tmp_path, launched):
    row = re.compile(r"^(one process|\w+)((?: +-?[\d.]+)+)$", re.MULTILINE)
    names = ["all_reduce", "all_gather", "reduce_scatter", "one process", "ddp", "fsdp"]
    assert [name for name, _ in row.findall(BENCHMARKS.readme.partition("profiled on")[0])] == names
    lines = BENCHMARKS.commands("distributed_benchmarks.py")
    assert len(lines) == 3
    for line in launched(lines):
        output, _, profile = BENCHMARKS.run(f"{line} --steps 1 --layers 2", tmp_path).partition("ddp, profiled on")
        rows = row.findall(output)
        assert [name for name, _ in rows] == names
        assert bool(profile) == ("--profile" in line)
        if profile:
            found = dict(
                re.findall(r"^(step|aten::mm|gloo:all_reduce) +([\d.]+)(?: +[\d.]+){2}$", profile, re.MULTILINE)
            )
            assert found.keys() == {"step", "aten::mm", "gloo:all_reduce"}
            assert found["step"] == "1.0"
            traces = sorted((tmp_path / "runs/trace").iterdir())
            assert [path.name for path in traces] == ["rank0.json", "rank1.json"]
            events = json.loads(traces[0].read_text())["traceEvents"]
            assert {"step", "gloo:all_reduce"} <= {event.get("name") for event in events}
        one, ddp, fsdp = (float(numbers.split()[-1]) for _, numbers in rows[3:])
        assert one == ddp == pytest.approx(2 * fsdp, abs=0.2)  # megabytes stored


def test_fsdp_of_the_benchmarks_takes_the_steps_of_ddp(script):
    benchmarks = script("distributed_benchmarks")

    def body(world):
        options = benchmarks.argparse.Namespace(width=8, layers=2, batch_size=2, tokens=4)
        states = []
        for strategy in ("ddp", "fsdp"):
            torch.manual_seed(world.rank)
            training = benchmarks.training(strategy, options, world.device)
            torch.manual_seed(world.rank)
            training.step()
            states.append([whole(parameter) for parameter in training.model.parameters()])
        return states

    for ddp, fsdp in run_ranks(body, 2):
        torch.testing.assert_close(ddp, fsdp)


def whole(parameter):
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


def test_a_script_without_a_launcher_names_the_command():
    done = CHAPTER.fork("python point_to_point.py")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "start it by torchrun --nproc_per_node=2 point_to_point.py"


def test_the_command_that_verifies_nccl_answers_in_any_build():
    [line] = CHAPTER.commands("nccl.version")
    assert re.fullmatch(r"NCCL in this build: \(2, .*\)|no NCCL in this build", CHAPTER.run(FORKED + line).strip())


@pytest.mark.parametrize("line", sorted({line for _, line in FORMS}))
def test_shardwise_forms_have_arguments_that_their_commands_take(line, monkeypatch):
    [folder, *_] = [name for name, form in FORMS if form == line]
    monkeypatch.chdir(EXAMPLES / folder)
    _, _, name, *arguments = shlex.split(line)
    command.commands[name].make_context(name, arguments)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "line"), FORMS)
def test_shardwise_forms_run(name, line, tmp_path):
    chapter = Chapter(EXAMPLES / name)
    assert finish(chapter.start(f"{line} || test $? = 3", tmp_path), 500)  # 3: on a busy machine a link may be slow


def test_every_script_of_the_readmes_is_run_here():
    lines = CHAPTER.commands() + BENCHMARKS.commands()
    scripts = {
        argument for line in lines for argument in line.split() if argument.endswith(".py") and "/" not in argument
    }
    assert scripts == {path.name for chapter in (CHAPTER, BENCHMARKS) for path in chapter.folder.glob("*.py")} - {
        "ranks.py",
        "broken.py",  # test_gallery_debugging.py
    }
