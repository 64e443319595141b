"""Text written by a trained decoder whose Linears DeepSpeed has cut over the ranks, compared with plain PyTorch.

    deepspeed --num_gpus=2 deepspeed_train.py --save runs/decoder
    deepspeed --num_gpus=2 deepspeed_inference.py --weights runs/decoder/weights.pt
    torchrun --nproc_per_node=2 deepspeed_inference.py --weights runs/decoder/weights.pt --temperature 0.8

Rows of the first Linear of a pair and columns of the second go to each rank, which then sum their parts: one all-reduce
after attention, one after the two Linears. --kernels asks for DeepSpeed's fused CUDA kernels; where there are none, the
script says why and goes on without.
"""

import argparse
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from byte_decoder import HEAD_WIDTH, LENGTH, Block, Decoder, ready_deepspeed


def main() -> None:
    options = parse_options()
    deepspeed = ready_deepspeed()
    deepspeed.init_distributed(verbose=False)
    if options.kernels:
        say(f"without fused kernels: {why_no_kernels(deepspeed)}")

    plain = trained_decoder(options.weights)
    model, device = served_decoder(deepspeed, options.weights)
    prompt = torch.frombuffer(bytearray(options.prompt.encode()), dtype=torch.uint8).long()[None, :]
    for temperature in (0.0, options.temperature):
        way = f"sampled at {temperature}" if temperature else "greedy"
        written = generate(model, prompt.to(device), options.bytes, temperature).cpu()
        say(f"--- {way}\n{bytes(written[0].tolist()).decode(errors='replace')}")
        if not torch.equal(written, generate(plain, prompt, options.bytes, temperature)):
            raise SystemExit(f"{way}: plain PyTorch writes another text")
    with torch.no_grad():
        context = written[:, -LENGTH:]
        difference = (model(context.to(device)).cpu() - plain(context)).abs().max().item()
    say(f"--- plain PyTorch writes the same; logits differ by at most {difference:.1e}")
    dist.barrier()
    dist.destroy_process_group()


def served_decoder(deepspeed: ModuleType, weights: Path) -> tuple[torch.nn.Module, torch.device]:
    """Return the decoder cut over all ranks, or whole where its heads do not divide (communicates)."""
    model, ranks = trained_decoder(weights), dist.get_world_size()
    heads = model.embed.embedding_dim // HEAD_WIDTH
    if heads % ranks:
        say(f"plain PyTorch on every rank: {heads} heads do not divide by {ranks} processes")
        return model, torch.device("cpu")
    # <cut>
    engine = deepspeed.init_inference(
        model,
        dtype=torch.float32,
        # A head stays whole. By default DeepSpeed cuts in grains of 64 rows, whatever the heads.
        tensor_parallel={"tp_size": ranks, "tp_grain_size": HEAD_WIDTH},
        # For a Block: the Linears whose results are sums over ranks. All its others are cut by rows.
        injection_policy={Block: ("attention.out", "mlp.down")},
    )
    # </cut>
    held = sum(parameter.numel() for parameter in engine.module.parameters())
    say(f"cut over {ranks} processes: rank 0 holds {held:,} of {count(weights):,} numbers")
    return engine.module, next(engine.module.parameters()).device


def why_no_kernels(deepspeed: ModuleType) -> str:
    """Say why kernels cannot replace the modules of this decoder here."""
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
        raise SystemExit(f"{path} is not there: deepspeed --num_gpus=2 deepspeed_train.py --save {path.parent}")
    model = Decoder()
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


def count(path: Path) -> int:
    return sum(parameter.numel() for parameter in trained_decoder(path).parameters())


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tensor-parallel generation by DeepSpeed")
    add = parser.add_argument
    add("--weights", type=Path, default=Path("runs/decoder/weights.pt"), help="what deepspeed_train.py --save wrote")
    add("--prompt", default="def ")
    add("--bytes", type=int, default=60, help="how many to write")
    add("--temperature", type=float, default=0.8, help="of the sampled text")
    add("--kernels", action="store_true", help="use DeepSpeed's fused kernels where the device has them")
    add("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher gives it
    return parser.parse_args()


if __name__ == "__main__":
    main()
