"""Adapters merged into weights: in the weight's own dtype and direction, tied weights stay tied."""

import torch

from shardwise.checkpoint.convert.contents import Contents, form_of
from shardwise.checkpoint.convert.hugging_face import merge_adapters, merge_state

LORA = {"rank": 2, "alpha": 4, "dropout": 0.0, "transposed": ["b"]}


def factors(name):
    return {f"{name}.lora_A.weight": torch.randn(2, 3), f"{name}.lora_B.weight": torch.randn(3, 2)}


def product(state, name):
    return 2 * state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"]


def contents_of(state, **facts):
    named = {f"model/{name}": value for name, value in state.items()}
    return Contents(
        kind="shardwise",
        step=3,
        forms={name: form_of(name, value) for name, value in named.items()},
        facts={"lora": LORA, **facts},
        read=lambda names: {name: named[name] for name in names},
    )


def test_a_product_lies_as_the_weight_does():
    state = {"a.weight": torch.randn(3, 3), "b.weight": torch.randn(3, 3), **factors("a"), **factors("b")}
    found = merge_state(state, LORA)
    assert found.keys() == {"a.weight", "b.weight"}
    torch.testing.assert_close(found["a.weight"], state["a.weight"] + product(state, "a"))
    torch.testing.assert_close(found["b.weight"], state["b.weight"] + product(state, "b").T)


def test_a_merged_weight_keeps_its_dtype():
    state = {"a.weight": torch.randn(3, 3).bfloat16(), **factors("a")}
    found = merge_state(state, LORA)["a.weight"]
    assert torch.equal(found, (state["a.weight"].float() + product(state, "a")).bfloat16())


def test_a_module_in_two_places_is_merged_once_and_stays_tied():
    state = {"a.weight": torch.randn(3, 3), **factors("a")}
    found = merge_adapters(contents_of(state, tied={f"c.{kind}": f"a.{kind}" for kind in ("weight", "lora_A.weight")}))
    assert (found.forms.keys(), found.tied) == ({"model/a.weight"}, {"c.weight": "a.weight"})
    values = found.read(list(found.forms))
    torch.testing.assert_close(values["model/a.weight"], state["a.weight"] + product(state, "a"))


def test_contents_without_adapters_stay_as_they_are():
    contents = contents_of({"a.weight": torch.ones(3, 3)})
    assert merge_adapters(contents) is contents
