"""The decision matrix of the course: what guides recommend beside what `shardwise plan` predicts for the same GPUs.

python decision_matrix.py            # print the table
python decision_matrix.py --write    # write it into README.md
python decision_matrix.py --check    # exit code 1 when README.md has another table
"""

import argparse
import json
import re
from pathlib import Path
from typing import NamedTuple

import shardwise as sw

PAGE = Path(__file__).with_name("README.md")
TABLE = re.compile(r"(?<=<!-- table: decision_matrix.py -->\n).*?(?=<!-- end table -->)", re.DOTALL)


class Scenario(NamedTuple):
    """A row: a model, a cluster, and the advice of the guide for it."""

    title: str
    advice: str
    families: tuple[str, ...]
    """The plan families that follow the advice, the closest first."""
    model: str
    cluster: str
    lora: int | None = None


GPT2 = ("GPT-2 XL (1.5B), 4 GPUs", "FSDP FULL_SHARD", ("zero3",), "gpt2-xl")
LLAMA_7B = ("Llama 7B, 8 GPUs", "ZeRO-3 with offload", ("offload", "zero3"), "llama-7b")
LLAMA_70B = ("Llama 70B, 64 GPUs", "3D parallelism", ("3d",), "llama-70b")

SCENARIOS = (
    Scenario("ResNet-50, 8 GPUs", "DDP", ("ddp",), "resnet-50", "8xA100-80GB"),
    *(Scenario(*GPT2, cluster) for cluster in ("4xV100-16GB", "4xA100-40GB", "4xA100-80GB")),
    *(Scenario(*LLAMA_7B, cluster) for cluster in ("8xA100-40GB", "8xA100-80GB")),
    *(Scenario(*LLAMA_70B, cluster) for cluster in ("8x8xA100-80GB", "8x8xH100")),
    Scenario("fine-tuning Llama 70B, 8 GPUs", "FSDP + LoRA", ("zero3", "hsdp"), "llama-70b", "8xH100", lora=16),
)

NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "FSDP, ZeRO-3", "hsdp": "HSDP", "3d": "3D"}


def row(scenario: Scenario) -> str:
    """Return one line of the table, every number of it predicted by `plan`."""
    report = sw.plan(scenario.model, cluster=scenario.cluster, lora=scenario.lora)
    found = json.loads(report.to_json())
    best, families = found["best"], found["families"]
    if best["family"] in scenario.families:
        why = f"agrees: {found['path'][-1]['because']}"
    else:
        advised = scenario.families[0]
        why = f"differs: {NAMES.get(advised, advised)} is {families[advised]['reason']}"
    cells = (
        scenario.title,
        f"`{scenario.model} --cluster {scenario.cluster}{f' --lora {scenario.lora}' if scenario.lora else ''}`",
        scenario.advice,
        f"**{NAMES.get(best['family'], best['family'])}**, `{best['plan']['layout']}`",
        f"{best['memory']['total_bytes'] / 1e9:.1f} GB",
        why,
    )
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the whole table in Markdown."""
    head = "| model | `shardwise plan` | usual advice | `plan` chooses | memory per GPU | agreement |"
    return "\n".join([head, "|---|---|---|---|---|---|", *(row(scenario) for scenario in SCENARIOS)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="The decision matrix, by shardwise plan")
    parser.add_argument("--write", action="store_true", help="write the table into README.md")
    parser.add_argument("--check", action="store_true", help="compare it with the table of README.md")
    options = parser.parse_args()
    page = PAGE.read_text()
    if options.write:
        PAGE.write_text(TABLE.sub(lambda _: table(), page))
    elif options.check:
        if TABLE.search(page)[0] != table():
            raise SystemExit("README.md has another table: run python decision_matrix.py --write")
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
