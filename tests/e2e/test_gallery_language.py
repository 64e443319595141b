"""Chapter 7 of the gallery: a corpus, packed rows and a mixture; a killed run resumes to the losses of a whole one."""

import argparse
import importlib
import re
import shutil

import pytest
import torch

import shardwise as sw
from e2e.gallery import EXAMPLES, FORKED, Chapter
from shardwise.testing import run_ranks

pytestmark = pytest.mark.timeout(300)

CHAPTER = Chapter(EXAMPLES / "07-language-models")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with the corpus of the chapter, and what its commands printed."""
    folder = tmp_path_factory.mktemp("chapter")
    shutil.copy(CHAPTER.folder / "kill_when.sh", folder)
    lines = [*CHAPTER.commands("documents.py"), *CHAPTER.commands("shardwise data")]
    assert len(lines) == 5
    return folder, [CHAPTER.run(f"{FORKED}{line}", folder) for line in lines]


@pytest.fixture
def script(prepared, monkeypatch):
    """Import a script of the chapter, beside the corpus."""
    monkeypatch.syspath_prepend(CHAPTER.folder)
    monkeypatch.chdir(prepared[0])
    return importlib.import_module


def test_the_corpus_is_what_the_readme_shows(prepared):
    _, (_, code, _, inspected, mixed) = prepared
    assert re.search(r"^documents +400 \(0 empty ones dropped\)$", code, re.MULTILINE)
    assert "--- document 0 of chunk 0" in inspected
    shown = re.search(r"^480 rows .*?repeats after 4 rows", CHAPTER.readme, re.MULTILINE)[0]
    assert shown in mixed
    assert [row.split()[2:4] for row in mixed.splitlines() if "00%" in row] == [["75.00%", "360"], ["25.00%", "120"]]


def test_packed_rows_have_every_token_once_as_target_and_none_across_documents(script, prepared):
    plain = script("pretrain_plain")
    source = plain.Source(prepared[0] / "runs" / "code")
    documents = [source.tokens[a:b] for a, b in zip(source.starts, source.starts[1:], strict=False)]
    expected = sorted(token for document in documents for token in document[1:].tolist())
    found = []
    for number in range(len(source.packed)):
        tokens, positions, ids, targets = source.row(number)
        starts = (ids[1:] != ids[:-1]) & (ids[1:] >= 0)
        assert (positions[1:][starts] == 0).all()
        is_next = targets[:-1] != plain.IGNORE
        inside = (ids[1:] == ids[:-1]) & is_next
        assert (targets[:-1][inside] == tokens[1:][inside]).all()
        found += targets[targets != plain.IGNORE].tolist()
    assert sorted(found) == expected


def test_plain_pytorch_has_the_losses_of_the_job_on_its_rows(script, monkeypatch):
    job, plain = script("pretrain").job, script("pretrain_plain")
    monkeypatch.setattr(plain, "STEPS", 3)
    rows = [row for row, _ in zip(job.data("train"), range(3 * plain.BATCH_SIZE), strict=False)]
    options = argparse.Namespace(resume=False, save_every=0)

    def by_job(world):
        step = sw.build_step(job, sw.Plan.preset("ddp", world.size, batch_size=job.batch_size), world)
        shares = [step(batch).loss_share for batch, _ in zip(step.feed, range(3), strict=False)]
        return [float(share) for share in shares]

    expected = torch.tensor(run_ranks(by_job, 2)).sum(0)
    for losses in run_ranks(lambda _: plain.train(rows.__getitem__, options), 3):
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=0, atol=1e-5)


def test_a_resumed_plain_run_has_the_losses_of_a_whole_one(script, monkeypatch, tmp_path):
    plain = script("pretrain_plain")
    sources = {name: plain.Source(plain.Path("runs") / name) for name in plain.MIXTURE}
    assert all(source.packed for source in sources.values())  # here, once, and not in every rank

    def train(steps, size, **others):
        monkeypatch.setattr(plain, "STEPS", steps)
        options = argparse.Namespace(folder=tmp_path, save_every=2, **others)
        return run_ranks(lambda _: plain.train(lambda number: plain.mixed(sources, number), options), size)[0]

    whole = train(4, 2, resume=False)
    train(2, 2, resume=False)
    resumed = train(4, 3, resume=True)
    assert resumed == pytest.approx(whole, abs=1e-5)
    assert len(set(resumed)) == 4


def test_a_model_that_ignores_documents_is_refused_with_the_sentence_of_the_readme(prepared):
    folder, _ = prepared
    leaking = shutil.copytree(CHAPTER.folder, folder / "leaking", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    decoder = leaking / "decoder.py"
    mask = "(is_same & is_before)[:, None]"
    assert mask in decoder.read_text()
    decoder.write_text(decoder.read_text().replace(mask, "is_before[:, None]"))
    (leaking / "runs").symlink_to(folder / "runs")
    done = Chapter(leaking).fork("shardwise train pretrain.py")
    assert done.returncode == 2
    [sentence] = re.findall(r"^shardwise: .*", done.stderr, re.MULTILINE)
    assert sentence in " ".join(CHAPTER.readme.split())


@pytest.mark.prove
def test_a_killed_run_resumes_on_three_processes_to_the_losses_of_a_whole_run(prepared):
    folder, _ = prepared
    lines = [line for line in CHAPTER.commands() if re.search(r"pretrain|compare", line) and "verify" not in line]
    assert len(lines) == 9
    outputs = [CHAPTER.run(line, folder) for line in lines]
    assert "killed when" in outputs[1]
    assert "killed when" in outputs[5]
    assert "resumed at step" in outputs[6]
    # A kill that comes late leaves a later checkpoint, and fewer steps.
    for index, steps in {3: [40], 7: [8, 16, 24, 32], 8: [40]}.items():
        found = re.search(r"(\d+) steps in common, losses differ by at most (\S+)", outputs[index])
        assert int(found[1]) in steps
        assert float(found[2]) < 1e-5


@pytest.mark.prove
def test_two_processes_equal_one(prepared):
    [line] = CHAPTER.commands("shardwise verify")
    assert "2 passed" in CHAPTER.run(line, prepared[0])


@pytest.mark.prove
def test_the_step_is_explained(tmp_path):
    [line] = CHAPTER.commands("bench comm")
    assert "buckets" in CHAPTER.run(line, tmp_path)


def test_every_command_of_the_readme_is_run_here():
    assert len(CHAPTER.commands()) == 1 + 5 + 9 + 1
