"""Optimizer states that wait outside of the device: in host memory, or in files on a disk.

    deepspeed --num_gpus=2 zero_offload.py --offload cpu
    torchrun --nproc_per_node=2 zero_offload.py --offload nvme --nvme-path runs/nvme

Adam's moments and the float32 copy of the weights are 12 of the 16 bytes that a parameter takes, and are used once per
step. Offload changes where they are, not what is computed: the losses are compared with plain PyTorch's.
"""

import argparse
import os
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from byte_decoder import Decoder, global_batch, load_text, next_byte_loss, plain_losses, ready_deepspeed

BATCH_SIZE = 8
ADAMW = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


def main() -> None:
    options = parse_options()
    deepspeed = ready_deepspeed()
    if options.offload == "nvme":
        require_asyncio(deepspeed)
    deepspeed.init_distributed(verbose=False)
    torch.manual_seed(0)
    model = Decoder(options.width)
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=make_config(options.offload, options.nvme_path)
    )
    text, rank, world_size = load_text(), dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(options.steps):
        rows = global_batch(text, step, BATCH_SIZE).tensor_split(world_size)[rank].to(engine.device)
        loss = next_byte_loss(engine(rows[:, :-1]), rows)
        engine.backward(loss)
        engine.step()
        dist.all_reduce(loss)
        losses.append(loss.item() / world_size)
        print_rank0(f"step {step + 1} of {options.steps}: loss {losses[-1]:.4f}")
    print_rank0(where_states_are(optimizer, options.nvme_path if options.offload == "nvme" else None))
    if rank == 0:
        torch.manual_seed(0)
        plain = plain_losses(Decoder(options.width), text, options.steps, BATCH_SIZE, **ADAMW)
        difference = max(abs(mine - other) for mine, other in zip(losses, plain, strict=True))
        print(f"plain PyTorch on one process: losses differ by at most {difference:.1e}")
        if difference > 1e-3:
            raise SystemExit("the losses are not those of plain PyTorch")
    dist.barrier()
    dist.destroy_process_group()


def make_config(offload: str, path: Path) -> dict:
    """Return DeepSpeed's configuration; a dict does as well as a file."""
    config = {
        "train_batch_size": BATCH_SIZE,
        "train_micro_batch_size_per_gpu": BATCH_SIZE // dist.get_world_size(),
        "gradient_clipping": 1.0,
        # torch's own AdamW updates on the host. DeepSpeed's CPUAdam is faster; it compiles first, for a minute:
        # leave out "torch_adam" and the line below.
        "optimizer": {"type": "AdamW", "params": ADAMW | {"torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
    }
    # <offload>
    if offload == "cpu":  # each rank's part of the states in its host's memory; stages 1, 2 and 3 can
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": torch.cuda.is_available()}}
    else:  # in files, one for each tensor of each rank; stage 3 only
        zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(path), "buffer_count": 4}}
        # Parameters can go there, too ("offload_param"). On CPU DeepSpeed 0.19 then keeps them in bf16, whatever the
        # configuration requests, and continues with the rounded values.
    # </offload>
    return config | {"zero_optimization": zero}


def require_asyncio(deepspeed: ModuleType) -> None:
    """Exit with a message where DeepSpeed's asynchronous file I/O cannot be built."""
    builder = deepspeed.accelerator.get_accelerator().create_op_builder("AsyncIOBuilder")
    if not builder.is_compatible(verbose=False):
        raise SystemExit("NVMe offload needs DeepSpeed's AsyncIO, which needs libaio: apt-get install libaio-dev g++")
    if os.environ["RANK"] == "0":
        print("AsyncIO is compiled at its first use: some minutes, once, into TORCH_EXTENSIONS_DIR or ~/.cache")
    builder.load(verbose=False)


def where_states_are(optimizer: torch.optim.Optimizer, path: Path | None) -> str:
    """Describe how many bytes of rank 0's optimizer states are in memory, and how many on disk."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    tensors += optimizer.fp32_partitioned_groups_flat if stage_3 else optimizer.single_partition_of_fp32_groups
    places = ", ".join(sorted({str(tensor.device) for tensor in tensors}))
    in_memory = (
        f"Adam's moments and the copy of the weights on rank 0: {sum(t.nbytes for t in tensors):,} bytes ({places})"
    )
    if path is None:
        return in_memory
    files = [file for file in path.rglob("*") if file.is_file()]
    on_disk = sum(file.stat().st_size for file in files)
    return f"{in_memory}; {on_disk:,} bytes of all ranks in {len(files)} files in {path}"


def print_rank0(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ZeRO-Offload and ZeRO-Infinity")
    add = parser.add_argument
    add("--offload", choices=("cpu", "nvme"), default="cpu", help="where optimizer states wait")
    add("--nvme-path", type=Path, default=Path("runs/nvme"), help="folder for their files, on a fast disk")
    add("--steps", type=int, default=4)
    add("--width", type=int, default=256, help="of the decoder; tensors below 1 MiB are not worth a file to DeepSpeed")
    add("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher gives it
    return parser.parse_args()


if __name__ == "__main__":
    main()
