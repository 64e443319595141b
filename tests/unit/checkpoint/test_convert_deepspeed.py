"""DeepSpeed directories: shardwise reads those of plain DeepSpeed, which resumes from ours with the same losses."""

import importlib.util
import os
import random

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from refusals import refuses
from shardwise.checkpoint import load, read_manifest
from shardwise.checkpoint.convert.convert import convert, open_contents
from shardwise.checkpoint.disk import DamagedError
from shardwise.checkpoint.spec import ConvertSpec
from shardwise.cli.main import main
from shardwise.engines.deepspeed.config import deepspeed_config
from shardwise.engines.deepspeed.engine import load_deepspeed
from shardwise.layout import Layout
from shardwise.plans import Plan
from shardwise.plans.sections import Precision
from shardwise.testing import run_ranks

STEPS = 3
CLOSE = {"rel": 1e-5}
"""fp32 in another order; without the optimizer's states the second loss is 1e-2 away."""

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="pip install 'shardwise[deepspeed]'"
)


class Net(nn.Module):
    """Odd shapes, tied weights, a parameter that never gets a gradient, a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.norm = nn.LayerNorm(5)
        self.middle = nn.Linear(5, 5)
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens):
        self.calls += 1
        return self.head(torch.tanh(self.middle(self.norm(self.embed(tokens)))))


def built(*, sharded=False, frozen=False):
    torch.manual_seed(0)
    model = Net()
    model.norm.requires_grad_(not frozen)
    if sharded:
        fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    return model, [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def optimizer_of(groups, kind):
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9) if kind == "sgd" else torch.optim.AdamW(groups, lr=0.01)


def loss_of(model):
    return nn.functional.cross_entropy(model(torch.arange(7)).float(), torch.arange(7).roll(1))


def config_of(stage, ranks, compute="fp32", *, universal=False):
    layout = Layout(shard=ranks) if stage else Layout(replicate=ranks)
    zero = stage if ranks > 1 else 0
    plan = Plan(layout=layout, zero=zero, engine="deepspeed", precision=Precision(compute=compute))
    config = deepspeed_config(plan, clip_norm=None)
    config["zero_optimization"] |= {"stage": stage, "memory_efficient_linear": False}
    return config | ({"checkpoint": {"load_universal": True}} if universal else {})


def engine_of(world, config, kind="adamw"):
    """A bare DeepSpeed engine on the world that is there."""
    deepspeed = load_deepspeed(Plan(), torch.device("cpu"), world.local_rank)
    model, groups = built(frozen=kind == "frozen")
    config["zero_optimization"]["elastic_checkpoint"] = kind == "elastic"
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(groups, kind), config=config, dist_init_required=False
    )
    return engine


def stepped(engine, count):
    losses = []
    for _ in range(count):
        loss = loss_of(engine)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def saving(world, directory, wanted):
    """Train with bare DeepSpeed and save for each wanted form, then train on; return losses and DeepSpeed's weights."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = {}
    for stage, kind, compute in wanted:
        name = f"{stage}-{kind}-{compute}"
        engine = engine_of(world, config_of(stage, world.size, compute), kind)
        stepped(engine, STEPS)
        engine.save_checkpoint(directory / name)
        weights = {}
        if stage and world.rank == 0:
            merged = get_fp32_state_dict_from_zero_checkpoint(str(directory / name))
            weights = {key: tensor.clone() for key, tensor in merged.items()}
        found[name] = stepped(engine, STEPS), weights
    return found


def continuing(world, directories):
    """Load each directory into plain DeepSpeed with no option on the form but `load_universal`, and train on."""
    found = {}
    for path, stage, kind, universal in directories:
        engine = engine_of(world, config_of(stage, world.size, universal=universal), kind)
        loaded, _ = engine.load_checkpoint(path)
        assert loaded, f"{path} was not loaded"
        assert engine.global_steps == STEPS
        found[path, stage] = stepped(engine, STEPS), int(engine.module.calls)
    return found


def fsdp_stepped(model, optimizer, count):
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def fsdp_continuing(world, path):
    """Load a checkpoint of ours into plain FSDP2 code of this world, and train on."""
    model, groups = built(sharded=True)
    optimizer = optimizer_of(groups, "adamw")
    tensors = {f"model/{name}": value.detach() for name, value in model.named_parameters()}
    tensors |= {f"model/{name}": value for name, value in model.named_buffers()}
    for name, parameter in model.named_parameters():
        if f"optimizer/{name}/step" in read_manifest(path).tensors:
            state = optimizer.state[parameter]
            state |= {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter.detach())}
            state["exp_avg_sq"] = torch.zeros_like(parameter.detach())
            tensors |= {f"optimizer/{name}/{key}": value for key, value in state.items()}
    load(path, tensors, group=world.host_group)
    return fsdp_stepped(model, optimizer, STEPS), int(model.calls)


def fsdp_saving(world, path):
    """Train with plain FSDP2 code, save with torch's own writer, train on."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, groups = built(sharded=True)
    optimizer = optimizer_of(groups, "adamw")
    fsdp_stepped(model, optimizer, STEPS)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states, "step": STEPS}, checkpoint_id=path)
    return fsdp_stepped(model, optimizer, STEPS)


QUICK = [(2, "adamw", "fp32"), (3, "adamw", "fp32")]
EVERY = [
    *((stage, "adamw", "fp32") for stage in (0, 1, 2, 3)),
    *((stage, "sgd", "fp32") for stage in (2, 3)),
    *((stage, "adamw", "bf16") for stage in (1, 2, 3)),
    *((stage, "frozen", "fp32") for stage in (1, 2, 3)),
    (1, "elastic", "fp32"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepspeed")
    return directory, run_ranks(saving, 2, directory, QUICK, timeout_s=120)[0]


@pytest.fixture(scope="module")
def saved_all(tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepspeed")
    return directory, run_ranks(saving, 2, directory, EVERY, timeout_s=200)[0]


def convert_by_command(capfd, source, target, *options):
    assert main(["checkpoint", "convert", str(source), str(target), *options]) == 0
    return capfd.readouterr().out


def same(left, right):
    one, other = open_contents(left), open_contents(right)
    a, b = one.read(list(one.forms)), other.read(list(other.forms))
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert one.step == other.step
    assert one.tied == other.tied
    assert [group["params"] for group in one.groups] == [group["params"] for group in other.groups]
    assert [group["weight_decay"] for group in one.groups] == [group["weight_decay"] for group in other.groups]


def check_read(directory, found):
    for name, (_, weights) in found.items():
        contents = open_contents(directory / name)
        read = contents.read(list(contents.forms))
        assert contents.kind == "deepspeed"
        assert contents.step == STEPS
        assert contents.tied == {"head.weight": "embed.weight"}
        assert contents.left_out == (() if weights else contents.left_out)
        if weights:
            mine = {key.removeprefix("model/"): value for key, value in read.items() if key.startswith("model/")}
            # DeepSpeed's script leaves out frozen weights of stage 1; here they are ones and zeros.
            expected = {"norm.weight": torch.ones(5), "norm.bias": torch.zeros(5)} | weights
            assert mine.keys() | {"head.weight"} == expected.keys()
            assert all(torch.equal(mine[key], expected[key]) for key in mine)
            groups = [] if "elastic" in name else [3, 2] if "frozen" in name else [3, 4]
            assert [len(group["params"]) for group in contents.groups] == groups
            assert {len(states) for states in contents.states().values()} == {1 if "sgd" in name else 3}


@needs_deepspeed
def test_a_directory_reads_as_deepspeeds_own_script_reads_it(saved):
    check_read(*saved)


@needs_deepspeed
@pytest.mark.prove
def test_a_directory_of_any_stage_optimizer_and_precision_reads_as_deepspeeds_own_script_reads_it(saved_all):
    check_read(*saved_all)


@needs_deepspeed
@pytest.mark.slow
def test_a_stage_3_directory_of_two_ranks_resumes_as_fsdp_on_four(saved, tmp_path, capfd):
    directory, found = saved
    convert_by_command(capfd, directory / "3-adamw-fp32", tmp_path / "own", "--to", "shardwise")
    losses, calls = run_ranks(fsdp_continuing, 4, tmp_path / "own")[0]
    assert losses == pytest.approx(found["3-adamw-fp32"][0], **CLOSE)
    assert calls == 2 * STEPS


@needs_deepspeed
@pytest.mark.slow
def test_fsdp_resumes_as_deepspeed_at_stages_2_and_3(tmp_path, capfd):
    losses = run_ranks(fsdp_saving, 2, tmp_path / "dcp")[0]
    out = convert_by_command(capfd, tmp_path / "dcp", tmp_path / "any", "--to", "deepspeed")
    assert "left out: calls: written, but DeepSpeed loads only parameters of the optimizer" in out
    assert "left out: weight_decay by group: at stage 3 DeepSpeed applies" in out
    for stage in (2, 3):
        target, options = tmp_path / f"zero{stage}", ("--zero", str(stage), "--nproc", "2")
        out = convert_by_command(capfd, tmp_path / "dcp", target, "--to", "deepspeed", *options)
        assert out.count("left out") == out.count("left out: loss scale of fp16") == (stage == 3)
    directories = [
        (tmp_path / "any", 2, "adamw", True),
        (tmp_path / "zero2", 2, "adamw", False),
        (tmp_path / "zero3", 3, "adamw", False),
    ]
    resumed = run_ranks(continuing, 2, directories, timeout_s=120)[0]
    for (path, _), (found, calls) in resumed.items():
        assert found == pytest.approx(losses, **CLOSE), path
        assert calls == (STEPS if path.name == "any" else 2 * STEPS)


@needs_deepspeed
@pytest.mark.prove
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_directory_of_any_stage_resumes_at_any_stage_on_any_number_of_ranks(saved_all, tmp_path, capfd, ranks):
    directory, found = saved_all
    directories, expected = [], {}
    for source, kind in ((1, "adamw"), (2, "adamw"), (3, "adamw"), (2, "sgd"), (3, "sgd")):
        name = f"{source}-{kind}-fp32"
        for stage in (1, 2, 3):
            target, options = tmp_path / f"{name}-to-{stage}", ("--zero", str(stage), "--nproc", str(ranks))
            convert_by_command(capfd, directory / name, target, "--to", "deepspeed", *options)
            directories.append((target, stage, kind, False))
            expected[target] = found[name][0]
        target = tmp_path / f"{name}-to-any"
        convert_by_command(capfd, directory / name, target, "--to", "deepspeed")
        directories += [(target, stage, kind, True) for stage in (1, 2)]
        expected[target] = found[name][0]
    resumed = run_ranks(continuing, ranks, directories, timeout_s=280)[0]
    assert len(resumed) == len(directories)
    for (path, stage), (losses, _) in resumed.items():
        assert losses == pytest.approx(expected[path], **CLOSE), (path.name, stage)


def to_universal(world, source, target, stage):
    """Make a universal checkpoint with DeepSpeed's own script."""
    import argparse

    from deepspeed.checkpoint.ds_to_universal import main as make

    options = {"input_folder": source, "output_folder": target, "num_extract_workers": 1, "num_merge_workers": 1}
    options |= {"keep_temp_folder": False, "strict": True, "inject_missing_state": stage < 3}
    make(argparse.Namespace(**options))


@needs_deepspeed
@pytest.mark.prove
@pytest.mark.parametrize("stage", [2, 3])
def test_a_universal_checkpoint_of_deepspeeds_own_script_reads_as_the_directory_it_is_of(saved_all, tmp_path, stage):
    directory = saved_all[0] / f"{stage}-adamw-fp32"
    tag = (directory / "latest").read_text()
    run_ranks(to_universal, 1, str(directory / tag), str(tmp_path / "made"), stage)
    one, other = open_contents(directory), open_contents(tmp_path / "made")
    a, b = one.read(list(one.forms)), other.read(list(other.forms))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def a_checkpoint(tmp_path, seed=0, shapes=None):
    """A torch file of a training, with names for the parameters of its optimizer."""
    chance = random.Random(seed)
    shapes = shapes or [tuple(chance.choices(range(1, 8), k=chance.randint(1, 3))) for _ in range(chance.randint(1, 9))]
    names = [f"layer{n}.weight" for n in range(len(shapes))]
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in zip(names, shapes, strict=True)}
    split = chance.randint(1, len(names))
    groups = [part for part in (names[:split], names[split:]) if part]
    numbers = {name: n for n, name in enumerate(names)}
    state = {
        "model": weights | {"tied": weights[names[0]], "seen": torch.tensor(5)},
        "optimizer": {
            "state": {
                numbers[name]: {
                    "step": torch.tensor(4.0),
                    "exp_avg": torch.randn(weights[name].shape, generator=generator),
                    "exp_avg_sq": torch.rand(weights[name].shape, generator=generator),
                }
                for name in names
            },
            "param_groups": [
                {"lr": 0.1, "weight_decay": n / 2, "params": [numbers[name] for name in part], "param_names": part}
                for n, part in enumerate(groups)
            ],
        },
        "step": 4,
    }
    path = tmp_path / f"state{seed}.pt"
    torch.save(state, path)
    return path


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 24), marks=pytest.mark.prove)], ids=len)
def test_what_is_written_for_any_ranks_and_stage_reads_back_bit_for_bit(tmp_path, seeds):
    for seed in seeds:
        source = a_checkpoint(tmp_path, seed)
        convert(ConvertSpec(source=source, target=tmp_path / f"any{seed}", to="deepspeed"))
        same(source, tmp_path / f"any{seed}")
        for stage in (1, 2, 3):
            target = tmp_path / f"{seed}-{stage}"
            convert(
                ConvertSpec(
                    source=source,
                    target=target,
                    to="deepspeed",
                    zero=stage,
                    nproc=random.Random(seed + stage).randint(1, 5),
                )
            )
            same(source, target)


def test_a_directory_written_here_needs_no_deepspeed_and_holds_no_code(tmp_path):
    convert(ConvertSpec(source=a_checkpoint(tmp_path), target=tmp_path / "zero3", to="deepspeed", zero=3, nproc=2))
    data = (tmp_path / "zero3" / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").read_bytes()
    assert b"deepspeed.runtime.fp16.loss_scaler" in data
    assert b"shardwise" not in data


class Evil:
    def __reduce__(self):
        return (os.system, ("exit 1",))


def spoiled(tmp_path, change, stage=2):
    convert(ConvertSpec(source=a_checkpoint(tmp_path), target=tmp_path / "ds", to="deepspeed", zero=stage, nproc=2))
    change(tmp_path / "ds" / "global_step4")
    return tmp_path / "ds"


def test_a_directory_that_lacks_a_rank_is_named(tmp_path):
    path = spoiled(tmp_path, lambda directory: (directory / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink())
    with refuses("checkpoint.rank-file-missing", "rank 0", kind=DamagedError):
        open_contents(path)


def test_a_directory_that_lacks_its_last_rank_is_named(tmp_path):
    path = spoiled(tmp_path, lambda directory: (directory / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink())
    with refuses("checkpoint.rank-file-missing", 1, 2, kind=DamagedError):
        open_contents(path)


def test_code_in_a_file_is_refused_by_name_and_not_run(tmp_path):
    def put(directory):
        file = directory / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": Evil()}, file)

    with refuses("checkpoint.contains-code", "posix.system"):
        open_contents(spoiled(tmp_path, put))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("mp_rank_01_model_states.pt", "checkpoint.deepspeed-model-parallel"),
        ("layer_01-model_00-model_states.pt", "checkpoint.deepspeed-unsupported"),
    ],
)
def test_a_model_that_is_sharded_another_way_is_refused(tmp_path, name, code):
    path = spoiled(tmp_path, lambda directory: (directory / name).touch())
    with refuses(code, name):
        open_contents(path)


def test_weights_alone_are_refused_with_the_way_to_load_them(tmp_path):
    with refuses("checkpoint.no-optimizer"):
        convert(ConvertSpec(source=a_checkpoint(tmp_path), target=tmp_path / "ds", to="deepspeed", weights=True))
    assert not (tmp_path / "ds").exists()


def test_parameters_with_other_counts_of_steps_are_refused(tmp_path):
    source = a_checkpoint(tmp_path, shapes=[(2,), (3,)])
    state = torch.load(source)
    state["optimizer"]["state"][0]["step"] = torch.tensor(2.0)
    torch.save(state, source)
    with refuses("checkpoint.optimizer-steps-differ", "2 to 4"):
        convert(ConvertSpec(source=source, target=tmp_path / "ds", to="deepspeed"))


def test_ranks_without_a_stage_and_a_stage_for_another_kind_are_refused(tmp_path, capfd):
    source = str(a_checkpoint(tmp_path))
    target = str(tmp_path / "ds")
    assert main(["checkpoint", "convert", source, target, "--to", "deepspeed", "--nproc", "2"]) == 2
    assert "--zero and --nproc must be used together" in capfd.readouterr().err
    assert main(["checkpoint", "convert", source, target, "--to", "dcp", "--nproc", "2", "--zero", "2"]) == 2
    assert "are valid for --to deepspeed only" in capfd.readouterr().err


def test_inspect_shows_a_deepspeed_directory(tmp_path, capfd):
    convert(ConvertSpec(source=a_checkpoint(tmp_path), target=tmp_path / "ds", to="deepspeed", zero=1, nproc=2))
    assert main(["checkpoint", "inspect", str(tmp_path / "ds"), "--tensors"]) == 0
    assert "optimizer/layer0.weight/exp_avg" in capfd.readouterr().out
