"""No page claims what the code does not have: files, options, commands, public names, fields, targets and codes."""

from pathlib import Path

import pytest

from claims import stale

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
TRUE = """Write `sw.Plan.preset("ddp", 2)` and `Job.batch_size`, see `examples/digits.py` and `parallel/apply.py`.

```bash
shardwise train examples/digits.py --nproc 2 --set optimizer.lr=0.1 --set accumulation=2 && make test
```

`shardwise checkpoint ls` may raise `checkpoint.none-found`; `communication.bucket_mb` is a field.
"""
PLANTED = {
    "examples/digits.py --nproc": ("examples/gone.py --nproc", "file examples/gone.py does not exist"),
    "parallel/apply.py": ("parallel/gone.py", "file parallel/gone.py does not exist"),
    "--nproc 2": ("--nprocs 2", "option --nprocs does not exist"),
    "shardwise train": ("shardwise fit", "command shardwise fit does not exist"),
    "shardwise checkpoint ls": ("shardwise checkpoint list", "command shardwise checkpoint list does not exist"),
    "sw.Plan.preset": ("sw.Plan.named", "sw.Plan.named does not exist"),
    "`Job.batch_size`": ("`Job.global_batch`", "Job.global_batch does not exist"),
    "--set accumulation=2": ("--set accumulate=2", "key --set accumulate does not exist"),
    "make test": ("make check", "target make check does not exist"),
    "checkpoint.none-found": ("checkpoint.not-any-found", "error code checkpoint.not-any-found does not exist"),
    "communication.bucket_mb": ("communication.bucket", "Plan field communication.bucket does not exist"),
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_claims_only_what_exists(page):
    assert stale(page.read_text(), page) == []


def test_a_page_without_stale_claims_passes():
    assert stale(TRUE, ROOT / "README.md") == []


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_claim_is_found(planted):
    wrong, finding = PLANTED[planted]
    text = TRUE.replace(planted, wrong)
    assert text != TRUE
    assert stale(text, ROOT / "README.md") == [finding]
