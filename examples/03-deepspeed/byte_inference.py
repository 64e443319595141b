"""Text written by the decoder of `deepspeed_train.py --save`, sharded by DeepSpeed and compared with plain PyTorch.

Rows of the first Linear of a pair and columns of the second go to each rank, which then sum their results: one
all-reduce after attention, one after the two Linears.
"""

import argparse
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from byte_decoder import HEAD_WIDTH, LENGTH, Block, Decoder


def write_text(deepspeed: ModuleType, options: argparse.Namespace) -> None:
    """Write text greedily and by sampling; end with exit code 1 if plain PyTorch writes another one (communicates)."""
    plain = trained_decoder(options.weights)
    model, device = served_decoder(deepspeed, options.weights)
    prompt = torch.frombuffer(bytearray(options.prompt.encode()), dtype=torch.uint8).long()[None, :]
    for temperature in (0.0, options.temperature):
        way = f"sampled at {temperature}" if temperature else "greedy"
        written = generate(model, prompt.to(device), options.bytes, temperature).cpu()
        print_rank0(f"--- {way}\n{bytes(written[0].tolist()).decode(errors='replace')}")
        if not torch.equal(written, generate(plain, prompt, options.bytes, temperature)):
            raise SystemExit(f"{way}: plain PyTorch writes another text")
    with torch.no_grad():
        context = written[:, -LENGTH:]
        difference = (model(context.to(device)).cpu() - plain(context)).abs().max().item()
    print_rank0(f"--- plain PyTorch writes the same; logits differ by at most {difference:.1e}")


def served_decoder(deepspeed: ModuleType, weights: Path) -> tuple[torch.nn.Module, torch.device]:
    """Return the decoder sharded over all ranks, or whole where its heads do not divide (communicates)."""
    model, ranks = trained_decoder(weights), dist.get_world_size()
    heads = model.embed.embedding_dim // HEAD_WIDTH
    if heads % ranks:
        print_rank0(f"plain PyTorch on every rank: {heads} heads do not divide by {ranks} processes")
        return model, torch.device("cpu")
    # <shard>
    engine = deepspeed.init_inference(
        model,
        dtype=torch.float32,
        # A head stays whole. By default DeepSpeed splits in grains of 64 rows, whatever the heads.
        tensor_parallel={"tp_size": ranks, "tp_grain_size": HEAD_WIDTH},
        # For a Block: the Linears whose results are sums over ranks. All its others are split by rows.
        injection_policy={Block: ("attention.out", "mlp.down")},
    )
    # </shard>
    stored = sum(parameter.numel() for parameter in engine.module.parameters())
    print_rank0(f"sharded over {ranks} processes: rank 0 stores {stored:,} of {count(weights):,} parameters")
    return engine.module, next(engine.module.parameters()).device


def why_no_kernels(deepspeed: ModuleType) -> str:
    """Explain why kernels cannot replace the modules of this decoder here."""
    device = deepspeed.accelerator.get_accelerator().device_name()
    if device != "cuda":
        return f"DeepSpeed's inference kernels are written for CUDA, and this device is {device}"
    return "they replace layers of the Hugging Face models DeepSpeed has a policy for, and this decoder is our own"


@torch.no_grad()
def generate(model: torch.nn.Module, text: torch.Tensor, num_bytes: int, temperature: float) -> torch.Tensor:
    """Return `text` [1, T] and `num_bytes` more: the likeliest each, or drawn by a generator that all ranks share."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_bytes):
        logits = model(text[:, -LENGTH:])[:, -1].cpu()
        if temperature:
            byte = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            byte = logits.argmax(-1, keepdim=True)
        text = torch.cat((text, byte.to(text.device)), dim=1)
    return text


def trained_decoder(path: Path) -> Decoder:
    """Return the decoder with the weights that deepspeed_train.py saved."""
    if not path.is_file():
        raise SystemExit(f"{path} does not exist: run deepspeed --num_gpus=2 deepspeed_train.py --save {path.parent}")
    model = Decoder()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def count(path: Path) -> int:
    return sum(parameter.numel() for parameter in trained_decoder(path).parameters())


def print_rank0(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)
