"""A decoder trained by plain DeepSpeed: the six things one does by hand, numbered.

    deepspeed --num_gpus=2 deepspeed_train.py --deepspeed_config configs/zero2_config.json
    torchrun --nproc_per_node=2 deepspeed_train.py --deepspeed_config configs/zero3_config.json
    shardwise launch --nproc 2 deepspeed_train.py --deepspeed_config configs/zero1_config.json

The decoder guesses the next byte of Python's own sources, so nothing is downloaded. Every stage and every number of
processes trains on the same global batches and so prints the same losses; --check compares them with plain PyTorch.
"""

import argparse
import os
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from byte_decoder import Decoder, global_batch, load_text, next_byte_loss, plain_losses, ready_deepspeed

CONFIG = Path(__file__).parent / "configs/zero2_config.json"


def main() -> None:
    deepspeed = ready_deepspeed()
    options = parse_options(deepspeed)

    # Step 1: join the process group: NCCL on GPUs, gloo on CPUs.
    deepspeed.init_distributed(verbose=False)

    # Step 2: build the model, with the same values on every rank; DeepSpeed sends rank 0's to all.
    torch.manual_seed(0)
    model = Decoder()
    whole = sum(parameter.numel() for parameter in model.parameters())

    # Step 3: hand it over. The engine is the model, and contains the optimizer that the JSON describes.
    engine, optimizer, _, _ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
    print_rank0(f"ZeRO stage {engine.zero_optimization_stage()} on {dist.get_world_size()} processes ({engine.device})")
    print_rank0(
        f"{engine.train_batch_size()} samples a step = {engine.train_micro_batch_size_per_gpu()} per forward pass"
        f" x {engine.gradient_accumulation_steps()} passes x {dist.get_world_size()} processes"
    )

    text = load_text()
    losses = [train_step(engine, global_batch(text, step, engine.train_batch_size())) for step in range(options.steps)]
    for step in sorted({1, *range(options.report, options.steps + 1, options.report)}):
        print_rank0(f"step {step} of {options.steps}: loss {losses[step - 1]:.4f}")
    print_rank0(
        f"stored on rank 0: {state_bytes(engine, optimizer):,} bytes"
        f" for {whole:,} parameters, their copy, Adam's moments"
    )

    if options.check:
        limit = 5e-2 if engine.bfloat16_enabled() else 1e-3  # bf16 has 8 bits of mantissa, float32 has 24
        check(losses, text, engine.train_batch_size(), optimizer.param_groups[0], limit)
    if options.save:
        save(engine, options.save)
    dist.barrier()
    dist.destroy_process_group()


def train_step(engine: torch.nn.Module, batch: torch.Tensor) -> float:
    """Take one step on this rank's part of a global batch, and return the loss over all of it (communicates)."""
    mine = batch.tensor_split(dist.get_world_size())[dist.get_rank()].to(engine.device)
    micro_batches = mine.split(engine.train_micro_batch_size_per_gpu())
    loss_sum = torch.zeros((), device=engine.device)
    # <step>
    for rows in micro_batches:
        # Step 4: forward through the engine; under stage 3 it gathers each weight just before its use.
        loss = next_byte_loss(engine(rows[:, :-1]), rows)
        # Step 5: the ENGINE's backward: it divides by the passes of a step, and averages over ranks.
        # So micro-batches must count alike: a mean of means is the mean only if all have as many bytes.
        engine.backward(loss)
        # Step 6: call step after every pass. It counts them: clipping, update and zero_grad come with the last one.
        engine.step()
        loss_sum += loss.detach()
    # </step>
    dist.all_reduce(loss_sum)
    return loss_sum.item() / len(micro_batches) / dist.get_world_size()


def check(losses: list[float], text: torch.Tensor, batch_size: int, group: dict, limit: float) -> None:
    """Compare the losses with those of plain PyTorch on one process; fail if they differ too much (rank 0)."""
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        adamw = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        plain = plain_losses(Decoder(), text, len(losses), batch_size, **adamw)
        difference = max(abs(mine - other) for mine, other in zip(losses, plain, strict=True))
        print(f"plain PyTorch on one process: losses differ by at most {difference:.1e}")
        if difference > limit:
            raise SystemExit("the losses are not those of plain PyTorch")


def save(engine: torch.nn.Module, folder: Path) -> None:
    """Write a checkpoint, and the whole weights beside it (called on every rank: each has a shard of it)."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    engine.save_checkpoint(str(folder))
    dist.barrier()
    if dist.get_rank() == 0:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
        torch.save(weights, folder / "weights.pt")
        Decoder().load_state_dict(torch.load(folder / "weights.pt", weights_only=True))  # a plain module again
        print(f"saved {len(weights)} whole tensors to {folder / 'weights.pt'}")


def state_bytes(engine: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return this rank's bytes between two steps: weights, the optimizer's own copy of them, its states."""
    # Under stage 3 a parameter is empty between uses, and this rank's part of it is its `ds_tensor`.
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    stage_3 = engine.zero_optimization_stage() == 3
    copies = optimizer.fp32_partitioned_groups_flat if stage_3 else optimizer.single_partition_of_fp32_groups
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in [*weights, *copies, *states])


def print_rank0(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def parse_options(deepspeed: ModuleType) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A decoder trained by plain DeepSpeed")
    add = parser.add_argument
    # The deepspeed launcher gives it, torchrun does not; another number than LOCAL_RANK is an AssertionError.
    add("--local_rank", type=int, default=int(os.environ["LOCAL_RANK"]), help=argparse.SUPPRESS)
    add("--steps", type=int, default=20)
    add("--report", type=int, default=5, help="print the loss every so many steps")
    add("--check", action="store_true", help="train by plain PyTorch too, and compare")
    add("--save", type=Path, help="folder for a checkpoint and the whole weights")
    deepspeed.add_config_arguments(parser)  # --deepspeed, --deepspeed_config
    options = parser.parse_args()
    options.deepspeed_config = options.deepspeed_config or str(CONFIG)
    return options


if __name__ == "__main__":
    main()
