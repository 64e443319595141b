"""The state of a training: every tensor that a checkpoint holds, by name, and the facts beside them."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from shardwise.checkpoint.convert.contents import MODEL, OPTIMIZER
from shardwise.errors import JobError
from shardwise.job.lora import facts_of
from shardwise.training.optimizer_state import merge_plain_states, plain_states
from shardwise.training.step.whole import adapter_facts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.step.held import Forms, Held
    from shardwise.training.step.step import Step

UPDATE = "update/"


def state_tensors(step: Step, replica: int = 0) -> dict[str, Tensor]:
    """Return this rank's tensors of a training by name: whole ones, and pieces as DTensors; on every rank.

    model/NAME, optimizer/PARAMETER/KEY and update/KEY, under the names of the user's own module. Replicas that train on
    their own have equal weights when they have met, and optimizers of their own: those of all but the first are in
    update/replicaN/PARAMETER/KEY.
    """
    return _named(step.held(), _states_of(replica))


def make_room(step: Step, saved: Forms, replica: int = 0) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint is to fill, with optimizer states made as it has them.

    `saved` gives shape and dtype of every tensor in it. A replica of which it has none goes on from the first's.
    """
    own = _states_of(replica)
    prefix = own if any(name.startswith(own) for name in saved) else OPTIMIZER
    states = {name.removeprefix(prefix): form for name, form in saved.items() if name.startswith(prefix)}
    return _named(step.room(states), prefix)


def _states_of(replica: int) -> str:
    return f"{UPDATE}replica{replica}/" if replica else OPTIMIZER


def _named(held: Held, states: str) -> dict[str, Tensor]:
    tensors = {f"{MODEL}{name}": value for name, value in held.values.items()}
    tensors |= {f"{MODEL}{name}": buffer for name, buffer in held.buffers.items()}
    tensors |= {f"{states}{name}": value for name, value in held.states.items()}
    return tensors | {f"{UPDATE}{key}": value for key, value in held.update.items()}


def state_facts(job: Job, plan: Plan, world: World, step: Step) -> dict[str, Any]:
    """Return what a checkpoint says in words and numbers; communicates over the world, on every rank."""
    from shardwise.plans.toml import plan_to_toml

    return {
        "step": step.number,
        "num_steps": step.length.num_steps,
        "seed": job.seed,
        "batch_size": job.batch_size,
        "plan": plan_to_toml(plan),
        "layout": str(plan.layout),
        "torch": str(torch.__version__),
        "optimizer": {
            "class": step.optimized.kind,
            "groups": _groups(step, world),
            "values": merge_plain_states(world.gather(plain_states(step.optimized)), step.optimized.kind),
        },
        "tied": step.tied(),
        **_adapters(job, step),
        "random": {str(rank): state for rank, state in enumerate(world.gather(_written(step.random_state())))},
    }


def restore_random(facts: Mapping[str, Any], plan: Plan, world: World, step: Step) -> bool:
    """Go on drawing where each rank was; false where the layout is another one and a fresh stream begins.

    A fresh stream depends on the seed, the reader and the step, so it is the same however often it is resumed.
    """
    states = facts.get("random", {})
    if facts.get("layout") != str(plan.layout) or str(world.rank) not in states:
        step.seed(hash((facts.get("seed", 0), plan.layout.draw_index(world.rank), step.number)) & (2**62 - 1))
        return False
    step.set_random_state(
        {
            name: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
            for name, text in states[str(world.rank)].items()
        }
    )
    return True


def check_same_job(facts: Mapping[str, Any], job: Job, *, number: int, num_steps: int) -> None:
    """Refuse to go on with another stream of samples than the checkpoint's; one from elsewhere may not say."""
    for name, now in (("seed", job.seed), ("batch_size", job.batch_size)):
        if facts.get(name, now) != now:
            raise JobError(
                f"the checkpoint was saved with {name} {facts.get(name)}, the job has {now}: other samples would come",
                code="checkpoint.samples-differ",
                fix=f"--set {name}={facts.get(name)}, or --resume never",
            )
    saved = facts_of(facts)
    if saved is not None and job.lora is not None and saved.get("alpha") != job.lora.alpha:
        raise JobError(
            f"the checkpoint's adapters have alpha {saved.get('alpha')}, the job's {job.lora.alpha}",
            code="job.adapter-option-mismatch",
            fix=f"--set lora.alpha={saved.get('alpha')}, or --resume never",
        )
    if number > num_steps:
        raise JobError(
            f"the checkpoint is at step {number}, the job ends at {num_steps}",
            code="checkpoint.beyond-last-step",
            fix=f"--set steps=N with N of at least {number}, as the run that saved it had, or --resume never",
        )


def _written(states: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def _adapters(job: Job, step: Step) -> dict[str, Any]:
    """Return what a checkpoint tells of adapters; communicates over the world where there are some."""
    return {} if job.lora is None else {"lora": {**(adapter_facts(step.model) or {}), "base": job.weights}}


def _groups(step: Step, world: World) -> list[dict[str, Any]]:
    """Return the optimizer's groups with the names of their parameters on all stages; communicates over the world."""
    everyone = world.gather(step.optimized.group_names())
    groups = []
    for number, group in enumerate(step.optimized.param_groups):
        members = [name for groups_there in everyone for name in (groups_there[number : number + 1] or [[]])[0]]
        groups.append(_plain(group) | {"params": list(dict.fromkeys(members))})
    return groups


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of a parameter group what JSON can hold."""
    kept = {key: value for key, value in group.items() if key != "params"}
    return {key: value for key, value in kept.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError):
        return False
    return True
