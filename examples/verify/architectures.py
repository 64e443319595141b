"""Five architectures as transformers makes them, tiny and with random weights: job names bert, gpt2, llama, t5, vit."""

import transformers
from torch import randn
from torch.nn.functional import cross_entropy
from torch.random import fork_rng, manual_seed
from torch.utils.data import Dataset
from windows import COUNT, Gaps, Windows

import shardwise as sw

VOCABULARY = 260


class Masked(Dataset):
    """Rows of bytes with a mask over their padding; where the mask is 0, nothing is to be learnt."""

    def __init__(self):
        self.windows = Windows(16)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        tokens, target = self.windows[index]
        return {"input_ids": tokens, "attention_mask": (target >= 0).long(), "labels": target}


class Images(Dataset):
    """Noise and a label."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        with fork_rng():
            manual_seed(index)
            return {"pixel_values": randn(3, 16, 16), "labels": index % 5}


def tokens_of(batch):
    return (batch["labels"] != -100).sum()


def next_tokens_of(batch):
    return (batch["labels"][:, 1:] != -100).sum()


# These models can compute their own mean loss. From logits, row by row, short batches can be filled as well, which
# pipelines need: all their micro-batches have one shape.
def logits_of(model, batch):
    return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def next_token_sum(logits, batch):
    return cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def class_sum(logits, batch):
    return cross_entropy(logits, batch["labels"], reduction="sum")


def make_job(model, dataset, loss, **fields):
    return sw.Job(
        model=model,
        data=lambda split: dataset() if split == "train" else None,
        loss=loss,
        **fields,
        optimizer=sw.adamw(lr=1e-2),
        clip_norm=0.5,
        batch_size=40,
        steps=3,
    )


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}


def make_bert():
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=32, **SHAPE)
    return transformers.BertForMaskedLM(config)


def make_gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=4, n_head=4, n_positions=32, tie_word_embeddings=False
    )
    return transformers.GPT2LMHeadModel(config)


def make_llama():
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False, **SHAPE
    )
    return transformers.LlamaForCausalLM(config)


def make_t5():
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def make_vit():
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **SHAPE)
    return transformers.ViTForImageClassification(config)


bert = make_job(make_bert, Masked, sw.losses.returned_by_model(tokens_of))
gpt2 = make_job(make_gpt2, Masked, sw.Loss(sum=next_token_sum, count=next_tokens_of), forward=logits_of)
llama = make_job(make_llama, Masked, sw.Loss(sum=next_token_sum, count=next_tokens_of), forward=logits_of)
t5 = make_job(make_t5, lambda: Gaps(16), sw.losses.returned_by_model(tokens_of))
vit = make_job(make_vit, Images, sw.Loss(sum=class_sum), forward=logits_of)
