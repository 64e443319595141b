"""Checkpoints on object storage: only complete ones are ever visible, and they come back as they were saved."""

import contextlib
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from data.s3_server import SECRET

import shardwise as sw
from refusals import assert_refused, refuses
from shardwise.checkpoint import CheckpointDirectory, CheckpointError, DamagedError, save
from shardwise.checkpoint.disk import run_on_main
from shardwise.checkpoint.download import download_newest, find_remote_damage
from shardwise.checkpoint.listing import check_checkpoints, list_checkpoints
from shardwise.checkpoint.remote import RemoteCheckpoints, find_remote
from shardwise.checkpoint.spec import CheckSpec, ListSpec
from shardwise.checkpoint.uploader import Uploader
from shardwise.cli.main import main
from shardwise.data.storage import objects
from shardwise.errors import DataError, InputError
from shardwise.runs.directory import Keep
from shardwise.testing import run_ranks
from shardwise.training.spec import SaveSpec, TrainSpec
from shardwise.training.uploads import Uploads

KEEP_ALL, KEEP_ONE = Keep(), Keep(last=1)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A directory with checkpoints of steps 2, 4 and 6, and in `again` another one of step 4."""
    folder = tmp_path_factory.mktemp("checkpoints")
    write(folder, 2, 4, 6)
    (folder / "again").mkdir()
    write(folder / "again", 4)
    return folder


def write(folder, *steps):
    for step in steps:
        tensors = {"model/x": torch.randn(50), "optimizer/x/m": torch.randn(3, 4)}
        save(folder, step, tensors, {"metrics": {"loss": 1 / step}}, group=None)


@pytest.fixture
def url(request):
    yield f"memory://bucket/{request.node.name}"
    store = locate_store()
    for path in list(store.find("/bucket")):
        store.rm_file(path)


def locate_store():
    return RemoteCheckpoints.of_run("memory://bucket")._store._file_system()


@pytest.fixture
def remote(url):
    return RemoteCheckpoints.of_run(url)


def upload(remote, path, keep=KEEP_ALL):
    uploader = Uploader(remote, keep)
    uploader.submit(path)
    assert uploader.wait(30)
    return uploader.last


def name(step):
    return f"step-{step:08d}"


class DeadError(BaseException):
    """Ends whoever sends a request after the death of the process."""


class Death:
    """Lets a number of requests pass, and none after them: the process was killed."""

    def __init__(self, monkeypatch, num_requests):
        self.left, self.lock = num_requests, threading.Lock()
        request = objects.ObjectStore._request

        def counted(store, path, policy, method, *arguments, **options):
            with self.lock:
                self.left -= 1
            if self.left < 0:
                raise DeadError
            return request(store, path, policy, method, *arguments, **options)

        self._patch = monkeypatch.context()
        self._patch.__enter__().setattr(objects.ObjectStore, "_request", counted)

    def end(self):
        self._patch.__exit__(None, None, None)
        return self.left >= 0


def visible(remote):
    """The complete checkpoints, each of which must be intact."""
    names = remote.scan().complete
    assert [find_remote_damage(remote, each, deep=True) for each in names] == [[]] * len(names)
    return names


@pytest.mark.parametrize("replaces", [False, True], ids=["a new step", "another save of a step"])
def test_a_process_killed_at_any_request_leaves_complete_checkpoints_only(local, remote, monkeypatch, replaces):
    """A new checkpoint replaces an old one by --keep 1, or one of the same name: the requests of both are all tried."""
    old = [local / "again" / name(4), local / name(2)] if replaces else [local / name(2)]
    seen, is_alive, num_requests = set(), False, 0
    while not is_alive:
        for path in old:
            upload(remote, path)
        death = Death(monkeypatch, num_requests)
        uploader = Uploader(remote, KEEP_ONE)
        with contextlib.suppress(DeadError):
            uploader._upload(local / name(4))
        is_alive = death.end()
        seen.add(tuple(visible(remote)))
        assert upload(remote, local / name(4), KEEP_ONE).error is None
        assert remote.newest_first() == [name(4)]
        assert remote.read_manifest(name(4)) == (local / name(4) / "manifest.json").read_bytes()
        assert {path.partition("/")[0] for path in remote.folder.store.find(remote.folder)} == {name(4), "latest"}
        num_requests += 1
    assert num_requests > 10
    others = (name(2),)
    assert seen == {others, (name(4), *others), (name(4),)}


def test_the_newest_checkpoint_waits_and_the_others_are_skipped(local, remote, monkeypatch):
    began, may_end = threading.Event(), threading.Event()
    publish = RemoteCheckpoints.publish

    def slow(remote, *arguments):
        began.set()
        assert may_end.wait(30)
        return publish(remote, *arguments)

    monkeypatch.setattr(RemoteCheckpoints, "publish", slow)
    uploader = Uploader(remote, Keep())
    uploader.submit(local / name(2))
    assert began.wait(30)
    uploader.submit(local / name(4))
    uploader.submit(local / name(6))
    assert uploader.paths() == {local / name(2), local / name(6)}
    assert not uploader.wait(0.01)
    may_end.set()
    assert uploader.wait(30)
    assert uploader.paths() == set()
    reports = uploader.take_reports()
    assert [(each.name, each.skipped_for) for each in reports] == [
        (name(4), name(6)),
        (name(2), ""),
        (name(6), ""),
    ]
    assert visible(remote) == [name(6), name(2)]
    assert remote.newest_first() == [name(6), name(2)]


def test_a_checkpoint_submitted_when_the_thread_ends_is_uploaded_once(local, remote, monkeypatch):
    uploader, published = Uploader(remote, Keep()), []

    class SubmitsLater(threading.Condition):
        """Submits the next checkpoint when the thread of the first has found that none waits."""

        def __exit__(self, *error):
            super().__exit__(*error)
            if threading.current_thread().name == "upload" and uploader._current is None:
                monkeypatch.setattr(uploader, "_condition", threading.Condition())
                uploader.submit(local / name(4))

    def publish(_remote, checkpoint, _files, _manifest):
        published.append(checkpoint)
        time.sleep(0.05)  # a second thread would begin in this time
        return 0

    monkeypatch.setattr(RemoteCheckpoints, "publish", publish)
    monkeypatch.setattr(uploader, "_condition", SubmitsLater())
    uploader.submit(local / name(2))
    deadline = time.monotonic() + 30
    while (uploader.last is None or uploader.last.name != name(4)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert published == [name(2), name(4)]


def test_a_checkpoint_that_is_uploaded_is_not_pruned(tmp_path):
    write(tmp_path, 1, 2, 3)
    directory = CheckpointDirectory(tmp_path)
    assert directory.prune(KEEP_ONE, spare={tmp_path / name(1)}) == [tmp_path / name(2)]
    assert directory.prune(KEEP_ONE) == [tmp_path / name(1)]


def test_rules_apply_to_remote_checkpoints_and_best_is_named(local, remote):
    keep = Keep(last=1, best=1, metric="loss", highest=True)
    for step in (2, 4, 6):
        report = upload(remote, local / name(step), keep)
        assert (report.error, report.note) == (None, "")
    assert visible(remote) == [name(6), name(2)]
    assert (remote.named("latest"), remote.named("best")) == (name(6), name(2))
    assert upload(remote, local / name(6), keep).num_bytes == 0


def test_an_earlier_save_of_a_step_is_removed_after_the_new_one(local, remote, tmp_path):
    upload(remote, local / name(4))
    second = shutil.copytree(local / "again" / name(4), tmp_path / f"{name(4)}~2")
    assert upload(remote, second).error is None
    assert visible(remote) == [f"{name(4)}~2"]


def test_a_retention_that_fails_keeps_the_upload(local, remote, monkeypatch):
    def broken(self, name, files):
        raise DataError("out of order", code="data.storage-unreachable")

    upload(remote, local / name(2))
    with monkeypatch.context() as patch:
        patch.setattr(RemoteCheckpoints, "remove", broken)
        report = upload(remote, local / name(4), KEEP_ONE)
    assert (report.error, report.note) == (None, "out of order")
    assert visible(remote) == [name(4), name(2)]
    upload(remote, local / name(6), KEEP_ONE)
    assert visible(remote) == [name(6)]


def test_a_checkpoint_removed_during_its_upload_is_reported(remote, tmp_path):
    write(tmp_path, 2)
    (tmp_path / name(2) / "rank-00000.safetensors").unlink()
    report = upload(remote, tmp_path / name(2))
    assert report.error.code == "checkpoint.removed-during-upload"
    assert remote.scan().complete == []


# Downloads.


def overwrite(remote, step, change):
    path = remote.folder / name(step) / "rank-00000.safetensors"
    remote.folder.store.write(path, change(remote.folder.store.read_all(path)))


DAMAGES = {
    "a bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "the header": lambda content: content[:20] + b"X" + content[21:],
    "the size": lambda content: content[:-1],
}


def test_a_download_equals_the_checkpoint(local, remote, tmp_path):
    upload(remote, local / name(4))
    path = download_newest(remote, remote.newest_first(), tmp_path / "run" / "checkpoints", print)
    assert path == tmp_path / "run" / "checkpoints" / name(4)
    for file in (local / name(4)).iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()
    assert CheckpointDirectory(path.parent).latest() == path
    assert {each.name for each in path.parent.iterdir()} == {name(4), "latest", ".lock"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_for_an_older_one(local, url, remote, tmp_path, damage):
    for step in (2, 4, 6):
        upload(remote, local / name(step))
    overwrite(remote, 6, DAMAGES[damage])
    remote.folder.store.delete(remote.folder / name(4) / "rank-00000.safetensors")
    notes = []
    path = download_newest(remote, remote.newest_first(), tmp_path, notes.append)
    assert path.name == name(2)
    assert [name(6) in notes[0], name(4) in notes[1], len(notes)] == [True, True, 2]
    assert {each.name for each in tmp_path.iterdir()} == {name(2), "latest", ".lock"}
    report = check_checkpoints(CheckSpec(path=url))
    assert report.exit_code == 3
    assert [bool(row.damages) for row in report.rows] == [False, True, True]


def test_if_all_are_damaged_nothing_appears(local, remote, tmp_path):
    upload(remote, local / name(2))
    overwrite(remote, 2, DAMAGES["a bit"])
    with refuses("checkpoint.none-usable", name(2), kind=DamagedError):
        download_newest(remote, remote.newest_first(), tmp_path, print)
    assert {each.name for each in tmp_path.iterdir()} == {".lock"}


def test_a_checkpoint_without_a_manifest_is_invisible(local, url, remote):
    upload(remote, local / name(2))
    upload(remote, local / name(4))
    remote.folder.store.delete(remote.folder / name(4) / "manifest.json")
    assert find_remote(url)[1] == [name(2)]
    with refuses("checkpoint.none-found", name(4)):
        find_remote(f"{url}/checkpoints/{name(4)}")
    with refuses("checkpoint.none-found", "latest"):
        find_remote(f"{url}/checkpoints/latest")


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("", [6, 4, 2]),
        ("/", [6, 4, 2]),
        ("/checkpoints", [6, 4, 2]),
        (f"/checkpoints/{name(4)}", [4]),
        ("/checkpoints/latest", [6]),
        ("/checkpoints/best", [2]),
    ],
)
def test_checkpoints_are_found_by_every_url(local, url, remote, place, found):
    for step in (2, 4, 6):
        upload(remote, local / name(step), Keep(best=3, metric="loss", highest=True))
    assert find_remote(url + place)[1] == [name(step) for step in found]
    rows = list_checkpoints(ListSpec(path=url + place)).rows
    assert [row.step for row in rows] == sorted(found)
    assert [str(row.path) for row in rows] == [f"{url}/checkpoints/{name(step)}" for step in sorted(found)]


# The uploads of a run.


def uploads_of(folder, url, events, **options):
    spec = SaveSpec(upload=url, **options)
    log = SimpleNamespace(write=lambda kind, **fields: events.append((kind, fields)))
    return Uploads(spec, folder, Keep(), world=SimpleNamespace(is_main=True), group=None, events=log)


def notes_of(events):
    return [fields["text"] for kind, fields in events if kind == "note"]


def failing(self, name, files, manifest):
    raise DataError("the bucket is on fire", code="data.storage-unreachable", fix="call the fire brigade")


def test_a_failed_upload_is_a_note_and_is_tried_again_at_the_end(local, url, remote, monkeypatch):
    events = []
    uploads = uploads_of(local, url, events)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteCheckpoints, "publish", failing)
        uploads.submit_latest()
        uploads._uploader.wait(30)
        uploads.check()
    assert [name(6) in note and "on fire" in note for note in notes_of(events)] == [True]
    assert uploads.finish(30) == f"and uploaded to {url}"
    assert visible(remote) == [name(6)]
    kinds = [kind for kind, _ in events]
    assert kinds == ["note", "upload", "note"]


def test_the_last_upload_may_fail_and_with_must_save_fails_the_run(local, url, monkeypatch):
    monkeypatch.setattr(RemoteCheckpoints, "publish", failing)
    events = []
    uploads = uploads_of(local, url, events)
    uploads.submit_latest()
    assert uploads.finish(30).startswith(f"but not uploaded to {url}")
    uploads = uploads_of(local, url, events, must_save=True)
    uploads.submit_latest()
    with pytest.raises(CheckpointError, match="on fire") as raised:
        uploads.finish(30)
    assert (raised.value.exit_code, raised.value.code) == (1, "data.storage-unreachable")


def test_auto_downloads_only_what_is_newer_than_the_local_checkpoints(local, url, remote, tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    uploads_of(folder, url, [], resume="auto").download()  # nothing is remote: the run starts at step 0
    assert not folder.exists()
    upload(remote, local / name(2))
    upload(remote, local / name(4))
    shutil.copytree(local / name(2), folder / name(2))
    events = []
    uploads_of(folder, url, events, resume="auto").download()
    assert CheckpointDirectory(folder).latest().name == name(4)
    assert notes_of(events) == [f"downloaded {name(4)} from {url}/checkpoints"]
    shutil.copytree(local / name(6), folder / name(6))
    (folder / "latest").write_text(name(6))
    uploads_of(folder, url, [], resume="auto").download()
    assert CheckpointDirectory(folder).latest().name == name(6)
    monkeypatch.setattr(RemoteCheckpoints, "newest_first", lambda self: failing(self, "", {}, b""))
    events = []
    uploads_of(folder, url, events, resume="auto").download()
    assert [name(6) in note and "on fire" in note for note in notes_of(events)] == [True]
    with pytest.raises(InputError, match="on fire"):  # without a local one, the run must not start at step 0
        uploads_of(tmp_path / "empty", url, [], resume="auto").download()


# Refusals, before a run directory or a rank exists.


@pytest.mark.parametrize("field", ["upload", "resume"])
def test_urls_with_secrets_are_refused(field):
    with refuses("data.url-credentials") as refused:
        TrainSpec.of("job.py", **{field: f"s3://KEY:{SECRET}@bucket/run"})
    assert SECRET not in str(refused.value)


def test_a_new_run_does_not_mix_with_the_checkpoints_of_another(local, url, remote, tmp_path):
    SaveSpec(upload=url).check_remote(None)
    assert locate_store().find("/bucket") == []  # the probe is gone
    upload(remote, local / name(2))
    for resume in (None, "never", str(local)):
        with refuses("run.upload-not-empty", url, name(2)):
            SaveSpec(upload=url, resume=resume).check_remote(tmp_path)
    SaveSpec(upload=url, resume="auto").check_remote(tmp_path)
    SaveSpec(upload=url, resume=f"{url}/checkpoints").check_remote(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    SaveSpec(upload=url).check_remote(tmp_path)  # a requeued job


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"upload": "nothing://bucket/run"}, "data.scheme-unknown"),
        ({"upload": "https://host/run"}, "data.scheme-read-only"),
        ({"resume": "https://host/run"}, "checkpoint.url-not-listable"),
        ({"resume": "memory://bucket/none"}, "checkpoint.none-found"),
    ],
)
def test_urls_that_cannot_be_used_are_refused(options, code):
    with refuses(code):
        SaveSpec(**options).check_remote(None)


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "s3://bucket/run"),
        ("diff", "s3://bucket/run", "s3://bucket/other"),
        ("prune", "s3://bucket/run", "--keep", "1"),
        ("convert", "s3://bucket/run", "out.pt", "--to", "torch"),
        ("convert", ".", "s3://bucket/run", "--to", "torch"),
    ],
)
def test_commands_on_local_checkpoints_refuse_urls(arguments, capsys):
    assert main(["checkpoint", *arguments]) == 2
    assert_refused(capsys.readouterr().err, "spec.path-is-url", "s3://")


def test_functions_and_fields_of_local_paths_refuse_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "s3://bucket/run"
    calls = [
        lambda: sw.save(url, {"x": 1}),
        lambda: sw.load(url, {"x": 1}),
        lambda: tiny_job(weights=url),
        lambda: TrainSpec.of("job.py", run_dir=url),
        lambda: TrainSpec.of("job.py", run_dir=Path(url)),
    ]
    for call in calls:
        with refuses("spec.path-is-url", "s3://"):
            call()
    assert list(tmp_path.iterdir()) == []


def tiny_job(**fields):
    return sw.Job(
        model=lambda: torch.nn.Linear(1, 1),
        data=lambda split: [],
        loss=sw.losses.cross_entropy,
        optimizer=sw.sgd(lr=0.1),
        batch_size=1,
        steps=1,
        **fields,
    )


# Waiting for rank 0.


def test_ranks_wait_for_rank_0_and_raise_its_error():
    def work(world):
        group = world.own_host_group()

        def slow():
            assert world.rank == 0
            time.sleep(0.5)  # more than one poll
            return "done"

        def fail():
            raise DataError("the bucket is on fire", code="data.storage-unreachable")

        assert run_on_main(group, "waiting", slow) == "done"
        with pytest.raises(DataError, match=r"waiting failed on rank 0 .*on fire"):
            run_on_main(group, "waiting", fail)

    run_ranks(work, 2)
