"""Hugging Face directories: weights in one file or several, read by transformers and from transformers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from refusals import refuses
from shardwise.checkpoint import save
from shardwise.checkpoint.convert import hugging_face as convert_hf
from shardwise.checkpoint.convert.convert import convert, open_contents
from shardwise.checkpoint.disk import DamagedError
from shardwise.checkpoint.spec import ConvertSpec


def weights():
    torch.manual_seed(0)
    return {"a": torch.randn(4, 3), "b": torch.randn(5).bfloat16(), "c": torch.tensor(3), "none": torch.empty(0, 2)}


def own(directory):
    tensors = {f"model/{name}": value for name, value in weights().items()}
    tensors |= {"optimizer/a/step": torch.tensor(1.0), "update/scale": torch.tensor(2.0)}
    return save(directory, 1, tensors, {"step": 1, "tied": {"d": "a"}}, group=None).path


def read_back(directory):
    contents = open_contents(directory)
    return {name.removeprefix("model/"): tensor for name, tensor in contents.read(list(contents.forms)).items()}


def assert_same(found):
    expected = weights()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])


def test_weights_go_there_and_back_and_the_rest_is_listed(tmp_path):
    report = convert(ConvertSpec(source=own(tmp_path / "own"), target=tmp_path / "hf", to="hf"))
    assert_same(read_back(tmp_path / "hf"))
    assert [text.partition(":")[0] for text in report.left_out] == [
        "d",
        "optimizer",
        "update",
        "facts (step)",
        "config.json",
    ]
    assert report.num_tensors == 4


def test_several_files_have_an_index_and_read_the_same(tmp_path):
    contents = open_contents(own(tmp_path / "own"))
    convert_hf.write(contents, tmp_path / "hf", max_file_bytes=50)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "hf").glob("*.safetensors")}
    assert len(files) == 2
    assert set(index["weight_map"].values()) == files
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in weights().values())
    assert_same(read_back(tmp_path / "hf"))


def test_one_safetensors_file_is_read_too(tmp_path):
    save_file(weights(), tmp_path / "one.safetensors")
    assert_same(read_back(tmp_path / "one.safetensors"))


def directory_with_index(path, weight_map):
    path.mkdir()
    save_file(weights(), path / "x.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_an_index_that_leaves_the_directory_is_refused(tmp_path):
    directory = directory_with_index(tmp_path / "hf", {"a": "../x.safetensors"})
    with refuses("checkpoint.path-escapes"):
        open_contents(directory)


def test_a_weight_that_the_index_promises_in_vain_is_named(tmp_path):
    directory = directory_with_index(tmp_path / "hf", {"a": "x.safetensors", "zz": "x.safetensors"})
    with refuses("checkpoint.tensor-missing", "'zz'", kind=DamagedError):
        open_contents(directory)


def test_a_missing_or_torn_file_is_named(tmp_path):
    directory = directory_with_index(tmp_path / "hf", {"a": "x.safetensors", "b": "y.safetensors"})
    with refuses("checkpoint.read-failed", "y.safetensors", kind=DamagedError):
        open_contents(directory)
    torn = directory / "x.safetensors"
    torn.write_bytes(torn.read_bytes()[:-3])
    with refuses("checkpoint.read-failed", "x.safetensors", kind=DamagedError):
        open_contents(torn)


def test_a_weight_in_two_files_without_an_index_is_refused(tmp_path):
    for name in ("x", "y"):
        save_file(weights(), tmp_path / f"{name}.safetensors")
    with refuses("checkpoint.tensor-repeated"):
        open_contents(tmp_path)


def test_a_run_without_checkpoints_is_converted_from_its_weights_with_its_config(tmp_path):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "job.json").write_text("{}")
    with refuses("checkpoint.run-without-checkpoint", run, "--save-every"):
        open_contents(run)
    torch.save(weights(), run / "weights.pt")
    (run / "report.json").write_text('{"result": {"steps": 7}}')
    for name in ("config.json", "generation_config.json"):
        (run / "model" / name).write_text(name)
    for number, (source, config) in enumerate(
        [(run, None), (run / "weights.pt", None), (own(run / "x"), run / "model")]
    ):
        target = tmp_path / str(number)
        report = convert(ConvertSpec(source=source, target=target, to="hf", config=config))
        assert_same(read_back(target))
        assert (target / "generation_config.json").read_text() == "generation_config.json"
        assert (target / "config.json").read_text() == "config.json"
        if source == run:
            assert report.step == 7
            [left_out] = report.left_out
            assert str(run / "weights.pt") in left_out
    with refuses("checkpoint.config-not-found", run):
        convert(ConvertSpec(source=run, target=tmp_path / "none", to="hf", config=run))


@pytest.mark.slow
def test_transformers_reads_what_we_write_and_we_what_it_writes(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=8, vocab_size=11)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.arange(8)[None]
    loss = model(tokens, labels=tokens).loss
    model.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    convert(ConvertSpec(source=tmp_path / "theirs", target=tmp_path / "own", to="shardwise"))
    report = convert(
        ConvertSpec(
            source=tmp_path / "own", target=tmp_path / "ours", to="hf", config=tmp_path / "theirs" / "config.json"
        )
    )
    assert report.left_out == ("facts (step): the directory contains weights only",)
    back = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    assert back.lm_head.weight is back.transformer.wte.weight
    assert torch.equal(back(tokens, labels=tokens).loss, loss)
    torch.save(model.state_dict(), tmp_path / "tied.pt")
    tied = convert(
        ConvertSpec(
            source=tmp_path / "tied.pt",
            target=tmp_path / "from_torch",
            to="hf",
            config=tmp_path / "theirs" / "config.json",
        )
    )
    assert tied.left_out == ("lm_head.weight: stored once, tied to transformer.wte.weight",)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "from_torch").eval()
    assert torch.equal(again(tokens, labels=tokens).loss, loss)
