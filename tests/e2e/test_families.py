"""Families of transformers, unchanged, under every kind of plan: equal to one process, or refused with the reason."""

import random
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

import shardwise as sw
from shardwise.job import load_job, refer
from shardwise.parity.verify import verify
from shardwise.plans import Plan
from shardwise.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
JOBS = ROOT / "examples" / "verify" / "families.py"
UNUSED = "ddp+communication.find_unused_parameters=true"
PLANS = {
    "ddp": "ddp",
    UNUSED: "ddp, unused",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "fsdp",
    "zero3+recompute=full": "fsdp, recompute",
    "tp": "tp",
    "pp+accumulation=2": "pp",
    "cp": "cp",
}
"""Plan -> the head of its column."""

DECODERS = (
    *("gpt2", "gptj", "gpt_neox", "opt", "bloom", "falcon", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2"),
    *("gemma3", "phi", "phi3", "olmo2", "gpt_oss", "mixtral", "deepseek_v3", "mamba", "rwkv"),
)
ENCODERS = ("bert", "roberta", "distilbert", "electra", "albert", "deberta")
IMAGES = ("vit", "clip", "convnext", "swin", "resnet")
PAIRS = ("t5", "bart", "whisper", "llava")
FAMILIES = (*DECODERS, *ENCODERS, *IMAGES, *PAIRS)

NO_GRADIENT = dict.fromkeys(("clip", "llava"), "train.unused-parameters")
TIED = ("gpt2", "opt", "bloom", "falcon", "gemma", "gemma2", "gemma3", "mamba", *ENCODERS)
WITHOUT_RULES = (
    *("gpt2", "gptj", "opt", "bloom", "falcon", "mamba", "rwkv", "t5", "bart", "whisper"),
    *ENCODERS,
    *IMAGES,
)
WRONG_SIDE = {"opt": "support.pipeline-registration-order", "deberta": "support.pipeline-foreign-parameter"}
"""Families that register on one side of their layers what they use on the other."""
REFUSED = {
    "ddp": NO_GRADIENT,
    "zero1": NO_GRADIENT,
    "tp": {
        **dict.fromkeys(WITHOUT_RULES, "support.tp-no-rules"),
        **dict.fromkeys(("mixtral", "deepseek_v3"), "support.tp-style"),
    },
    "pp+accumulation=2": {
        **WRONG_SIDE,
        **dict.fromkeys(PAIRS, "support.pipeline-several-lists"),
        "albert": "support.pipeline-no-blocks",
        "rwkv": "support.pipeline-parameter-write",
    },
    "cp": {
        **dict.fromkeys(("bloom", "mamba", "rwkv", "t5", "bart", "whisper", *IMAGES), "support.cp-no-position-ids"),
        **dict.fromkeys(("gptj", "gemma2", "gpt_oss", "deberta"), "support.cp-without-sdpa"),
        **dict.fromkeys(("mistral", "gemma3"), "support.cp-partial-attention"),
        "llava": "support.cp-mixes-tokens",
        "falcon": "support.cp-attention-mask",
        "roberta": "support.cp-positions-from-padding",
    },
}
"""Plan -> family -> error code. What is not named here must pass."""

STEPS = 3
CLASS = re.compile(r"\w+(ForCausalLM|ForMaskedLM|ForImageClassification|ForConditionalGeneration|LMHeadModel)")
HEAD = """# Families of transformers under every kind of plan

Made by `make prove`. Each model is a tiny transformers model with random weights, defined in
`examples/verify/families.py`; it trains {steps} steps under each plan on 2 CPU ranks and in one process, from the same
weights and data, with uneven padding and a short last step. A cell is the largest relative difference of any loss,
gradient, gradient norm, final parameter or buffer, in fp64, and must stay below 1e-9. A dash means that the
plan is refused before the first update; the reason is below the table. "ddp, unused" is ddp with
`communication.find_unused_parameters=true`. Since cp does not support masks, decoders and encoders use packed
sequences.

"""


def judge(job, plans):
    return verify(f"{JOBS}:{job}", plans, nproc=2, steps=STEPS, timeout_s=120).verdicts if plans else ()


def check(name, plans):
    """Verify one family; every plan must give the numbers of one process, or a refusal that is known."""
    packed = f"{name}_packed" if name in (*DECODERS, *ENCODERS) else name
    verdicts = [
        *judge(name, [plan for plan in plans if plan != "cp"]),
        *judge(packed, [plan for plan in plans if plan == "cp"]),
    ]
    for verdict in verdicts:
        known = REFUSED.get(verdict.plan, {}).get(name)
        if verdict.status != "passed":
            assert verdict.status == "refused", verdict
            assert known is not None, verdict
            assert verdict.code == known, verdict
    return {verdict.plan: verdict for verdict in verdicts}


def models_table(found):
    """Return the table in Markdown, a row per family and a column per plan, and the reasons of refusals."""
    lines = [f"| family | {' | '.join(PLANS.values())} |", "|---" * (1 + len(PLANS)) + "|"]
    reasons = {}
    for name, verdicts in found.items():
        cells = [f"{verdicts[plan].worst.relative:.0e}" if verdicts[plan].worst else "-" for plan in PLANS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        for plan, head in PLANS.items():
            if verdicts[plan].status == "refused":
                reason = CLASS.sub("Model", verdicts[plan].reason)
                reasons.setdefault((head, reason), []).append(name)
    notes = [f"- {head}, {', '.join(names)}: {reason}" for (head, reason), names in sorted(reasons.items())]
    return "\n".join([*lines, "", *notes]) + "\n"


@pytest.fixture(scope="module")
def found():
    """Verdicts of the whole proof, by family; the docs table is written when all of them are there."""
    verdicts = {}
    yield verdicts
    if set(verdicts) == set(FAMILIES):
        text = HEAD.format(steps=STEPS) + models_table({name: verdicts[name] for name in FAMILIES})
        (ROOT / "docs" / "results" / "models-table.md").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("name", random.Random("families").sample(FAMILIES, 2))
def test_a_slice_of_families_computes_what_one_process_computes(name):
    check(name, random.Random(name).sample(list(PLANS), 3))


def built_otherwise(world, name):
    """Return what of a model built by a plan differs from the one that transformers builds, given its parameters."""
    job = load_job(refer(f"{JOBS}:{name}", {}))
    step = sw.build_step(job, Plan.preset("ddp", 1, batch_size=job.batch_size), world)
    plain = job.model()
    plain.load_state_dict(step.model.state_dict())
    own = dict(step.model.named_buffers())
    rows = default_collate([job.data("train")[index] for index in range(3)])
    logits = [model.eval()(**rows).logits for model in (plain, step.model)]
    buffers = [f"{name} {path}" for path, buffer in plain.named_buffers() if not torch.equal(buffer, own[path])]
    return buffers if torch.equal(*logits) else [*buffers, f"{name} logits"]


@pytest.mark.slow
def test_models_are_built_with_all_state_beside_parameters():
    found = run_ranks(lambda world: [each for name in FAMILIES for each in built_otherwise(world, name)], 1)
    assert found == [[]]


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_what_one_process_computes_or_is_refused(name, found):
    found[name] = check(name, list(PLANS))


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted({*TIED} - {"albert"}))
def test_families_run_in_a_pipeline_untied_as_well(name):
    (verdict,) = judge(f"{name}_untied", ["pp+accumulation=2"])
    assert verdict.status == ("refused" if name in WRONG_SIDE else "passed"), verdict
    assert verdict.code == WRONG_SIDE.get(name, "")
