"""Fine-tune a Hugging Face folder by LoRA: the frozen model is sharded over ranks, a folder comes out that peft loads.

    shardwise train lora_finetune.py --nproc 2 --plan fsdp --run-dir runs/lora
    python lora_finetune.py runs/lora

The second line puts the adapters beside the original model with peft, and compares its logits with those of the merged
weights. The model is a tiny Llama, made on first use; set BASE to a folder of your own for a real one.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import shardwise as sw

LENGTH = 32
BASE = Path("runs/tiny-llama")
text = sw.datasets.text(length=LENGTH)


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


def compare(run: Path) -> float:
    """Return the largest difference between logits of peft's model and of the merged weights."""
    from peft import PeftModel

    tokens = torch.stack([text("train")[index][0] for index in range(2)])
    with torch.no_grad():
        # <peft>
        base = AutoModelForCausalLM.from_pretrained(BASE)
        adapted = PeftModel.from_pretrained(base, run / "adapter")
        # </peft>
        by_peft = adapted(tokens).logits
        merged = AutoModelForCausalLM.from_pretrained(BASE)
        before = merged(tokens).logits
        merged.load_state_dict(torch.load(run / "weights.pt", weights_only=True))
        print(f"adapters move logits by up to {(by_peft - before).abs().max():.3f}")
        return (by_peft - merged(tokens).logits).abs().max().item()


if __name__ == "__main__":
    print(f"peft's logits and those of the merged weights differ by {compare(Path(sys.argv[1])):.1e}")
