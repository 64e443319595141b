"""Inference with DeepSpeed: a Llama of transformers sharded over the ranks, with a KV cache, in batches, in bf16.

    deepspeed --num_gpus=2 deepspeed_inference.py
    torchrun --nproc_per_node=2 deepspeed_inference.py --precision fp32 --batch-size 8
    deepspeed --num_gpus=2 deepspeed_inference.py --model FOLDER         # a Hugging Face folder of your own
    deepspeed --num_gpus=2 deepspeed_inference.py --weights runs/decoder/weights.pt

Without --model, a small untrained Llama is built from its configuration: nothing is downloaded. The script checks every
result against plain PyTorch on one process, then prints latency with and without the cache, and memory beside the
formula. The last line serves the decoder that deepspeed_train.py --save has trained, and writes text.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from byte_decoder import ready_deepspeed
from byte_inference import print_rank0, why_no_kernels, write_text
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_llama(folder: Path | None, dtype: torch.dtype) -> nn.Module:
    """Return a Llama in eval mode: from a folder, else untrained and with the same values on every rank."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError:
        raise SystemExit("deepspeed_inference.py needs transformers: pip install transformers") from None
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        bos_token_id=None,
        eos_token_id=None,  # so that every answer has the length that is timed
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def shard(deepspeed: ModuleType, model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with its layers sharded over all ranks (communicates)."""
    # <shard>
    layer = type(model.model.layers[0])
    engine = deepspeed.init_inference(
        model,
        dtype=dtype,
        # A head stays whole: the default of 64 rows would split heads of another width.
        tensor_parallel={"tp_size": dist.get_world_size(), "tp_grain_size": model.config.head_dim},
        # The Linears whose results are sums over ranks. All others of a layer are split by their output features.
        injection_policy={layer: ("self_attn.o_proj", "mlp.down_proj")},
    )
    # </shard>
    return engine.module


def make_prompts(batch_size: int, vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return prompts of different lengths, padded on the LEFT: generation appends at the right end of every row."""
    longest = 128
    tokens = torch.randint(1, vocab_size, (batch_size, longest), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    for row in range(batch_size):
        mask[row, : row % (longest // 2)] = 0
    return {"input_ids": (tokens * mask).to(device), "attention_mask": mask.to(device)}


@torch.no_grad()
def generate(model: nn.Module, prompts: dict, num_tokens: int, *, use_cache: bool = True):
    """Return greedy answers and the cache of keys and values (communicates, on every rank)."""
    return model.generate(
        **prompts, max_new_tokens=num_tokens, do_sample=False, use_cache=use_cache, return_dict_in_generate=True
    )


def check(model: nn.Module, prompts: dict, options: argparse.Namespace, dtype: torch.dtype) -> None:
    """Compare logits and answers with plain PyTorch on one process (communicates; every rank has both)."""
    plain = make_llama(options.model, dtype).to(next(model.parameters()).device)
    with torch.no_grad():
        difference = (model(**prompts).logits - plain(**prompts).logits).abs().max().item()
    answers = generate(model, prompts, options.tokens).sequences
    same = (answers == generate(plain, prompts, options.tokens).sequences).all(dim=1).float().mean().item()
    print_rank0(f"plain PyTorch: logits differ by at most {difference:.1e}, {same:.0%} of the answers are the same")
    # In bf16 a sum in another order can change the likeliest token, and with it the rest of an answer.
    if dtype == torch.float32 and same < 1:
        raise SystemExit("plain PyTorch writes other answers")


def latency(work: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of the faster of two calls, the ranks beginning together."""
    times = []
    for _ in range(2):
        dist.barrier()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


def report(model: nn.Module, prompts: dict, options: argparse.Namespace) -> None:
    """Print latency and memory (communicates, on every rank)."""
    device, steps = next(model.parameters()).device, options.tokens - 1
    first = latency(lambda: generate(model, prompts, 1), device)
    cached = latency(lambda: generate(model, prompts, options.tokens), device)
    uncached = latency(lambda: generate(model, prompts, options.tokens, use_cache=False), device)
    print_rank0(
        f"batch of {options.batch_size}, prompts of {prompts['input_ids'].shape[1]} tokens, {options.tokens} new ones"
    )
    print_rank0(f"first token (prefill)      {first:>8.1f} ms")
    print_rank0(f"each token, with cache     {(cached - first) / steps:>8.1f} ms")
    print_rank0(f"each token, without        {(uncached - first) / steps:>8.1f} ms")

    cache = generate(model, prompts, options.tokens).past_key_values
    # <cache>
    config, tokens = model.config, prompts["input_ids"].shape[1] + steps  # the last token is never read again
    heads = config.num_key_value_heads // dist.get_world_size()
    numbers = 2 * config.num_hidden_layers * options.batch_size * heads * tokens * config.head_dim  # keys and values
    theory = numbers * DTYPES[options.precision].itemsize
    # </cache>
    measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    print_rank0(f"KV cache of rank 0         {measured:>12,} bytes, {theory:,} in theory")
    print_rank0(f"weights of rank 0          {weights:>12,} bytes")
    if device.type == "cuda":
        print_rank0(f"most memory on this GPU    {torch.cuda.max_memory_allocated():>12,} bytes")


def serve_llama(deepspeed: ModuleType, options: argparse.Namespace) -> None:
    """Shard, check and measure a Llama (communicates, on every rank)."""
    dtype, ranks = DTYPES[options.precision], dist.get_world_size()
    model = make_llama(options.model, dtype)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    if model.config.num_key_value_heads % ranks:
        raise SystemExit(f"{model.config.num_key_value_heads} key-value heads do not divide by {ranks} processes")
    model = shard(deepspeed, model, dtype)
    print_rank0(
        f"{type(model).__name__} in {options.precision} over {ranks} processes, {whole:,} bytes of weights in all"
    )
    prompts = make_prompts(options.batch_size, model.config.vocab_size, next(model.parameters()).device)
    check(model, prompts, options, dtype)
    report(model, prompts, options)


def main() -> None:
    options = parse_options()
    deepspeed = ready_deepspeed()
    deepspeed.init_distributed(verbose=False)
    if options.kernels:
        print_rank0(f"without fused kernels: {why_no_kernels(deepspeed)}")
    if options.weights:
        write_text(deepspeed, options)
    else:
        serve_llama(deepspeed, options)
    dist.barrier()
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tensor-parallel generation by DeepSpeed")
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face folder of a Llama (default: a small one from its configuration)")
    add("--precision", choices=DTYPES, default="bf16", help="of weights and cache")
    add("--batch-size", type=int, default=4, help="prompts that are answered together")
    add("--tokens", type=int, default=32, help="new tokens of each answer")
    add("--weights", type=Path, help="what deepspeed_train.py --save wrote: serve that decoder instead")
    add("--prompt", default="def ", help="with --weights")
    add("--bytes", type=int, default=60, help="with --weights: how many to write")
    add("--temperature", type=float, default=0.8, help="with --weights: of the sampled text")
    add("--kernels", action="store_true", help="use DeepSpeed's fused kernels where the device has them")
    add("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher gives it
    return parser.parse_args()


if __name__ == "__main__":
    main()
