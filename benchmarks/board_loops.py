"""Contenders of board.py: hand-written compiled loops, plans of shardwise, torchao, Accelerate and Fabric."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import torch

import shardwise as sw
from shardwise.parallel.float8 import is_aligned
from shardwise.parallel.recompute import block_of, find_blocks
from shardwise.planner.settle import local_device, settle_job_plan
from shardwise.plans import Float8, Plan, Precision
from step_loops import RATE, Race

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.models import DecoderConfig
    from shardwise.planner.settle import Tuning

REFERENCE = "hand-written"
MODULES = {"accelerate": "accelerate", "fabric": "lightning", "float8": "torchao", "torchao-by-hand": "torchao"}
"""Contender -> the package that it needs."""


class Board(Race):
    """The contenders of the board, by name."""

    tuning: Tuning | None = None
    long_job: sw.Job | None = None

    @property
    def backend(self) -> str:
        """The compiler of the loops by hand and of the peers: on a CPU, one that takes little time."""
        return "inductor" if self.device.type == "cuda" else "aot_eager"

    def contenders(self) -> dict[str, Callable]:
        """Return name -> function that builds the contender and returns its step."""
        return {
            REFERENCE: self.hand_compiled,
            "as-it-comes": self.as_it_comes,
            "at-its-best": self.at_its_best,
            "no-masters": self.no_masters,
            "float8": self.float8,
            "torchao-by-hand": self.torchao_by_hand,
            "blocks-fused": self.blocks_fused,
            "accelerate": self.accelerate_compiled,
            "fabric": self.fabric_compiled,
        }

    def hand_compiled(self, convert: Callable = lambda model: model) -> Callable:
        """The reference: the hand-written loop around one compiled region of model and loss."""
        model = convert(self.fresh())
        optimizer = self.optimizer(model)
        run = torch.compile(lambda batch: self.loss_of(model, batch), backend=self.backend)

        def step(batch):
            optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16):
                loss = run(batch.micro_batches[0].batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def torchao_by_hand(self) -> Callable:
        """The hand-written loop after torchao's conversion of the linear layers of blocks, with its default recipe."""
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("tensorwise")
        if self.device.type != "cuda":
            object.__setattr__(config, "emulate", True)

        def convert(model):
            names = block_linears(model)
            return convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in names)

        return self.hand_compiled(convert)

    @functools.cached_property
    def auto_plan(self) -> Plan:
        """The plan of a long job of this shape with `--plan auto`; by predictions alone if `tuning` is None."""
        long_job = self.long_job or dataclasses.replace(self.job, steps=100_000)  # a short job would stay eager
        device = local_device(None, 1)
        return settle_job_plan(long_job, "auto", world_size=1, device=device, overrides={}, tuning=self.tuning)

    def as_it_comes(self) -> Callable:
        """The plan that `shardwise train` settles on for this job and this GPU."""
        plan = self.auto_plan
        for name in ("layout", "precision", "compile", "capture", "fused_loss", "recompute"):
            print(f"  as-it-comes: {name} = {getattr(plan, name)} ({plan.source(name)})")
        print(f"  as-it-comes: micro_batch = {plan.micro_batch}, accumulation = {plan.accumulation}")
        return self.planned("as-it-comes", plan)

    def at_its_best(self) -> Callable:
        """bf16 weights with fp32 copies in the optimizer, bf16 moments, the model compiled, the step captured."""
        return self.planned("at-its-best", self.best_plan("bf16"))

    def no_masters(self) -> Callable:
        """The same without fp32 copies: the optimizer rounds the bf16 weights stochastically."""
        plan = self.best_plan("bf16")
        precision = dataclasses.replace(plan.precision, master="none")
        return self.planned("no-masters", dataclasses.replace(plan, precision=precision))

    def float8(self) -> Callable:
        """The same with the matrix products of blocks in float8."""
        plan = self.best_plan("float8")
        if self.device.type != "cuda":  # layers of the tiny shape are too narrow to be selected
            with torch.device("meta"):
                names = block_linears(self.job.model())
            plan = dataclasses.replace(plan, float8=Float8(modules=tuple(sorted(names))))
        return self.planned("float8", plan)

    def blocks_fused(self) -> Callable:
        """bf16 autocast over fp32 weights, every block compiled, and the loss computed without whole logits."""
        precision = Precision(compute="bf16")
        plan = Plan(micro_batch=self.job.batch_size, precision=precision, compile="blocks", fused_loss=True)
        return self.planned("blocks-fused", plan)

    def best_plan(self, compute: str) -> Plan:
        """Return the plan of `at-its-best` in one compute dtype."""
        precision = Precision(parameter="bf16", compute=compute, reduce="bf16", optimizer="bf16")
        return Plan(micro_batch=self.job.batch_size, precision=precision, compile="model", capture="step")

    def planned(self, name: str, plan: Plan) -> Callable:
        """Return the step of a plan; one with another micro-batch size splits the same global batches itself."""
        step = sw.build_step(self.job, plan, self.world, note=lambda text: print(f"  {name}: {text}"))
        if plan.micro_batch == self.job.batch_size:
            return lambda batch: step(batch).loss_share
        batches = iter(list(step.feed))
        return lambda _: step(next(batches)).loss_share

    def accelerate_compiled(self) -> Callable:
        """Accelerator(mixed_precision="bf16") with its TorchDynamoPlugin, which compiles the model in prepare."""
        from accelerate.utils import TorchDynamoPlugin

        return self.accelerate(dynamo_plugin=TorchDynamoPlugin(backend=self.backend, mode="default", dynamic=False))

    def fabric_compiled(self) -> Callable:
        """Fabric(precision="bf16-mixed") with fabric.setup(torch.compile(model)), which compiles its own wrapper."""
        import lightning.fabric  # noqa: F401 - replaces torch.compile, and setup requires a model compiled by that

        return self.fabric(functools.partial(torch.compile, backend=self.backend))


class TransformersBoard(Board):
    """The same contenders with a model of transformers, which computes its loss itself in the loops by hand."""

    def fresh(self) -> torch.nn.Module:
        """Return the job's model with the weights everybody starts from; tied weights and buffers need its __init__."""
        with self.device:
            model = self.job.model()
        model.load_state_dict(self._weights)
        return model

    def loss_of(self, model: Callable, batch: dict) -> torch.Tensor:
        """Return the model's own mean loss."""
        return model(**batch).loss


class LabelledTokens(torch.utils.data.Dataset):
    """Random rows of tokens, as dicts."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, self.config.vocab_size, (self.config.context,), generator=generator)
        return {"input_ids": row, "labels": row}


def transformers_job(config: DecoderConfig, rows: int, steps: int) -> sw.Job:
    """Return the training of a Qwen2 of transformers with these sizes."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    qwen = Qwen2Config(
        hidden_size=config.width,
        intermediate_size=config.hidden_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.context,
        tie_word_embeddings=config.tie_head,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return sw.Job(
        model=lambda: Qwen2ForCausalLM(qwen),
        data=lambda split: LabelledTokens(config) if split == "train" else None,
        forward=sw.losses.without_labels,
        loss=sw.losses.next_token,
        optimizer=sw.adamw(lr=RATE, weight_decay=0.0),
        batch_size=rows,
        steps=steps,
    )


def block_linears(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the linear layers in repeated blocks whose dimensions float8 kernels support."""
    blocks = find_blocks(model)
    linears = {name: each for name, each in model.named_modules() if type(each) is torch.nn.Linear}
    return frozenset(name for name, each in linears.items() if block_of(name, blocks) and is_aligned(each))


def num_parameters(job: sw.Job) -> int:
    """Return the number of parameters of the job's model; tied ones count once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in job.model().parameters())


def num_compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
