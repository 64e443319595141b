"""MLX's optimizers as torch's groups: every state goes out and in, every setting shows, every rate is the job's."""

import pytest
import torch
from engines.mlx.jobs import Net
from mlx import nn, optimizers

import shardwise as sw
from refusals import refuses
from shardwise.engines.mlx.arrays import form_of
from shardwise.engines.mlx.weights import make_groups, read_states, write_states
from shardwise.recorder.fingerprint import settings_print


def made(factory, model):
    form = form_of(model)
    _, groups = make_groups(factory, form, form.read(model, form.trained))
    return form, groups


def adafactor(_):
    return optimizers.Adafactor(1e-2, relative_step=False, beta_1=0.9)


def test_states_of_other_shapes_than_their_parameter_go_out_and_in():
    model = nn.Conv2d(2, 3, 4)
    form, groups = made(adafactor, model)
    states = {name: torch.rand_like(value) for name, value in read_states(groups, form).items() if "step" not in name}
    assert states["weight/exp_avg"].shape == (3, 2, 4, 4)  # as torch has the weight
    assert states["weight/exp_avg_sq_row"].shape == (3, 4, 4)
    write_states(groups, form, states)
    found = read_states(groups, form)
    assert all(torch.equal(found[name], value) for name, value in states.items())
    assert groups[0].optimizer.state["weight"]["exp_avg"].shape == model.weight.shape


@pytest.mark.parametrize(
    "factory",
    [lambda _: optimizers.Adafactor(), lambda _: optimizers.Adafactor(1e-2)],  # the second does not use its number
)
def test_an_optimizer_that_chooses_its_own_rates_is_refused(factory):
    with refuses("optimizer.own-schedule", "Adafactor") as found:
        made(factory, Net())
    assert "relative_step=False" in str(found.value)


def test_other_betas_are_other_settings():
    _, groups = made(sw.adamw(lr=0.1), Net())
    _, others = made(sw.adamw(lr=0.1, betas=(0.9, 0.95)), Net())
    prints = [settings_print([group.settings for group in each]) for each in (groups, others)]
    assert prints[0] != prints[1]
    assert groups[0].settings["betas"] == (0.9, 0.999)
