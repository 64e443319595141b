"""Fine-tune a Hugging Face folder by LoRA: the frozen model is sharded over ranks, a folder comes out that peft loads.

    shardwise train lora_finetune.py --nproc 2 --plan fsdp --run-dir runs/lora
    python lora_finetune.py runs/lora
    torchrun --nproc_per_node=2 lora_finetune.py --base FOLDER --run-dir runs/mine
    python lora_finetune.py runs/mine --base FOLDER

The second line puts the adapters beside the original model with peft, and compares its logits with those of the merged
weights. The model is a tiny Llama, made on first use; --base takes a folder of your own with the same names of layers.
"""

import argparse
import contextlib
import dataclasses
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import shardwise as sw
from shardwise.runs import RunDirectory

LENGTH = 32
BASE = Path("runs/tiny-llama")
text = sw.datasets.text(length=LENGTH)  # bytes as token ids: replace it by data of your tokenizer


def make_base() -> None:
    """Write a tiny untrained Llama as `save_pretrained` does; several processes may try at once."""
    if BASE.exists():
        return
    BASE.parent.mkdir(exist_ok=True)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, **size)
    with tempfile.TemporaryDirectory(dir=BASE.parent) as folder:
        draft = Path(folder) / BASE.name
        AutoModelForCausalLM.from_config(config).save_pretrained(draft)
        with contextlib.suppress(OSError):  # another process was first
            draft.rename(BASE)


make_base()

# <job>
job = sw.Job(
    model=lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(BASE)),
    weights=str(BASE),  # streamed from the folder into place, shard by shard; then frozen
    lora=sw.Lora(rank=8, alpha=16, targets=("q_proj", "v_proj", "down_proj")),
    data=lambda split: text(split) if split == "train" else None,
    forward=lambda model, batch: model(batch[0], use_cache=False).logits,
    loss=sw.losses.token_cross_entropy,
    optimizer=sw.adamw(lr=1e-2, weight_decay=0.0),
    batch_size=16,
    steps=10,
)
# </job>


def job_of(base: Path) -> sw.Job:
    """Return the job with another folder to fine-tune."""
    model = lambda: AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))  # noqa: E731
    return dataclasses.replace(job, model=model, weights=str(base))


def compare(run: Path, base_folder: Path = BASE) -> float:
    """Return the largest difference between logits of peft's model and of the merged weights."""
    from peft import PeftModel

    tokens = torch.stack([text("train")[index][0] for index in range(2)])
    with torch.no_grad():
        # <peft>
        base = AutoModelForCausalLM.from_pretrained(base_folder)
        adapted = PeftModel.from_pretrained(base, run / "adapter")
        # </peft>
        by_peft = adapted(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(base_folder)
        before = merged(tokens).logits
        merged.load_state_dict(torch.load(run / "weights.pt", weights_only=True))
        print(f"adapters move logits by up to {(by_peft - before).abs().max():.3f}")
        return (by_peft - merged(tokens).logits).abs().max().item()


def train(base: Path, run: Path) -> None:
    """Fine-tune `base` under FSDP on the ranks of the launcher (communicates, on every rank)."""
    with sw.world() as world:
        mine = job_of(base)
        run.mkdir(parents=True, exist_ok=True)
        plan = sw.Plan.preset("fsdp" if world.size > 1 else "one", world.size, batch_size=mine.batch_size)
        sw.train(mine, plan, world, run=RunDirectory(run), show_progress=False)
        world.print(f"adapters are in {run / 'adapter'}")


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA under FSDP, and its adapters in peft")
    parser.add_argument("run", nargs="?", type=Path, help="run directory of a training, to be compared with peft")
    parser.add_argument("--base", type=Path, default=BASE, help="Hugging Face folder to fine-tune")
    parser.add_argument("--run-dir", type=Path, help="train under a launcher, and write the adapters here")
    options = parser.parse_args()
    if not options.base.is_dir():
        raise SystemExit(f"--base {options.base} is not a folder")
    if options.run_dir:
        train(options.base, options.run_dir)
    elif options.run:
        difference = compare(options.run, options.base)
        print(f"peft's logits and those of the merged weights differ by {difference:.1e}")
    else:
        parser.error("give the run directory of a training, or --run-dir to train")


if __name__ == "__main__":
    main()
