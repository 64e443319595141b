"""Families of transformers, tiny and with random weights, as one brings them: a config, dict batches, a loss."""

from dataclasses import replace
from functools import partial

import torch
import transformers
from torch.utils.data import Dataset
from windows import COUNT, Windows

import shardwise as sw

LENGTH = 12
VOCABULARY, IMAGE_TOKEN = 260, 259
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PATCHES = {"image_size": 32, "patch_size": 8}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GROUPS = {"num_key_value_heads": 2}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


class Texts(Dataset):
    """Rows of bytes with a mask over their padding; every row has another number of labels."""

    def __init__(self):
        self.windows = Windows(LENGTH)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        tokens, target = self.windows[index]
        mask = (target >= 0).long()
        return {"input_ids": tokens + 3, "attention_mask": mask, "labels": torch.where(mask == 1, tokens + 3, -100)}


class Pairs(Dataset):
    """Something to read and bytes to write, for encoder-decoders."""

    def __init__(self, source):
        self.texts, self.source = Texts(), source

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        row = self.texts[index]
        labels = row.pop("labels")[: LENGTH // 2]
        return row | {"labels": labels} if self.source is None else {**noise(index, **self.source), "labels": labels}


class Packed(Texts):
    """The same bytes without padding, and so without a mask."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {"input_ids": row["input_ids"], "labels": row["labels"]}


class Captions(Texts):
    """An image in front of each text, in the place of its tokens."""

    def __getitem__(self, index):
        text, places = super().__getitem__(index), torch.full((16,), 1)
        front = {"input_ids": places * IMAGE_TOKEN, "attention_mask": places, "labels": places * -100}
        joined = {name: torch.cat([front[name], text[name]]) for name in front}
        return {**noise(index, pixel_values=(3, 32, 32)), **joined}


class Images(Dataset):
    """Noise and a class."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {**noise(index, pixel_values=(3, 32, 32)), "labels": index % 5}


def noise(index, **shapes):
    generator = torch.Generator().manual_seed(index)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def make_job(kind, name, dataset, loss, *, labelled=False, **config):
    """Train `kind` (an Auto class) of the family `name`; `labelled` models compute their own mean loss."""
    own = {} if labelled else {"forward": sw.losses.without_labels}
    return sw.Job(
        model=lambda: kind.from_config(transformers.AutoConfig.for_model(name, **config)),
        data=lambda split: dataset() if split == "train" else None,
        loss=loss,
        optimizer=sw.adamw(lr=1e-2),
        clip_norm=0.5,
        batch_size=40,
        steps=3,
        **own,
    )


def untied(make):
    model = make()
    model.config.tie_word_embeddings = False
    return type(model)(model.config)


def causal(name, **config):
    return make_job(transformers.AutoModelForCausalLM, name, Texts, sw.losses.next_token, **config)


def masked(name, **config):
    return make_job(transformers.AutoModelForMaskedLM, name, Texts, sw.losses.labels, **config)


def image(name, **config):
    kind = transformers.AutoModelForImageClassification
    return make_job(kind, name, Images, sw.losses.labels, num_labels=5, **config)


def sequences(name, kind=transformers.AutoModelForSeq2SeqLM, source=None, **config):
    loss = sw.losses.returned_by_model(sw.losses.count_labels)
    return make_job(kind, name, lambda: Pairs(source), loss, labelled=True, **config)


gpt2 = causal("gpt2", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32)
gptj = causal("gptj", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, rotary_dim=4)
gpt_neox = causal("gpt_neox", **TEXT, **SHAPE)
opt = causal("opt", **TEXT, **SHAPE, ffn_dim=48, word_embed_proj_dim=32)
bloom = causal("bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
falcon = causal("falcon", **TEXT, **SHAPE, ffn_hidden_size=48, alibi=True, new_decoder_architecture=False)
llama = causal("llama", **TEXT, **SHAPE, **GROUPS)
mistral = causal("mistral", **TEXT, **SHAPE, **GROUPS, sliding_window=8)
qwen2 = causal("qwen2", **TEXT, **SHAPE, **GROUPS)
qwen3 = causal("qwen3", **TEXT, **SHAPE, **GROUPS, head_dim=8)
gemma = causal("gemma", **TEXT, **SHAPE, **GROUPS, head_dim=8)
gemma2 = causal("gemma2", **TEXT, **SHAPE, **GROUPS, **WINDOWS, head_dim=8)
gemma3 = causal("gemma3_text", **TEXT, **SHAPE, **GROUPS, **WINDOWS, head_dim=8)
phi = causal("phi", **TEXT, **SHAPE)
phi3 = causal("phi3", **TEXT, **SHAPE, **GROUPS)
olmo2 = causal("olmo2", **TEXT, **SHAPE, **GROUPS)
gpt_oss = causal("gpt_oss", **TEXT, **SHAPE, **GROUPS, **WINDOWS, **EXPERTS, head_dim=8)
mixtral = causal("mixtral", **TEXT, **SHAPE, **GROUPS, **EXPERTS)
deepseek_v3 = causal(
    "deepseek_v3",
    **TEXT,
    **SHAPE,
    num_key_value_heads=4,
    q_lora_rank=8,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=4,
    v_head_dim=8,
    n_routed_experts=4,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    moe_intermediate_size=16,
)
mamba = causal("mamba", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
rwkv = causal("rwkv", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
bert = masked("bert", **TEXT, **SHAPE)
roberta = masked("roberta", **TEXT, **SHAPE)
distilbert = masked("distilbert", **TEXT, dim=32, hidden_dim=48, n_layers=2, n_heads=4)
electra = masked("electra", **TEXT, **SHAPE, embedding_size=16)
albert = masked("albert", **TEXT, **SHAPE, embedding_size=16)
deberta = masked("deberta-v2", **TEXT, **SHAPE, relative_attention=True, pos_att_type=["p2c", "c2p"])

# Context parallelism requires sequences of one length without a mask. Pipelines require that the head has an embedding
# of its own, because the head is on another stage.
for name, job in list(globals().items()):
    if isinstance(job, sw.Job):
        globals()[f"{name}_packed"] = replace(job, data=lambda split: Packed() if split == "train" else None)
        globals()[f"{name}_untied"] = replace(job, model=partial(untied, job.model))

vit = image("vit", **SHAPE, **PATCHES)
clip = image("clip", vision_config=SHAPE | PATCHES)
convnext = image("convnext", hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])
swin = image("swin", image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4)
resnet = image("resnet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic")
t5 = sequences(
    "t5", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
)
bart = sequences("bart", **ENCODER_DECODER, max_position_embeddings=32)
whisper = sequences(
    "whisper",
    transformers.AutoModelForSpeechSeq2Seq,
    {"input_features": (8, 32)},
    **ENCODER_DECODER,
    num_mel_bins=8,
    max_source_positions=16,
    max_target_positions=32,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
llava = make_job(
    transformers.AutoModelForImageTextToText,
    "llava",
    Captions,
    sw.losses.next_token,
    text_config={"model_type": "llama", **TEXT, **SHAPE, **GROUPS},
    vision_config={"model_type": "clip_vision_model", **SHAPE, **PATCHES},
    image_token_id=IMAGE_TOKEN,
    vision_feature_layer=-1,
)
