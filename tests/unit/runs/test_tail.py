"""Files that somebody else still writes."""

from shardwise.runs.events import Tail, end_of_file
from shardwise.runs.state import CHUNK

LINE = '{"kind":"note","text":"%s"}\n'


def texts(file):
    return [event["text"] for event in file.events()]


def test_missing_file_is_an_empty_one(tmp_path):
    file = Tail(tmp_path / "none")
    assert file.events() == []
    (tmp_path / "none").write_text(LINE % "a")
    assert texts(file) == ["a"]


def test_only_what_is_new_is_read(tmp_path):
    path = tmp_path / "events"
    path.write_text(LINE % "a")
    file = Tail(path)
    assert texts(file) == ["a"]
    with path.open("a") as more:
        more.write(LINE % "b")
    assert texts(file) == ["b"]
    assert texts(file) == []


def test_torn_last_line_waits_for_its_end(tmp_path):
    path, whole = tmp_path / "events", LINE % "torn"
    path.write_text(LINE % "a" + whole[:9])
    file = Tail(path)
    assert texts(file) == ["a"]
    with path.open("a") as more:
        more.write(whole[9:])
    assert texts(file) == ["torn"]


def test_lines_that_are_no_events_are_passed_over(tmp_path):
    path = tmp_path / "events"
    path.write_bytes(b'\x00\xff{\n[1]\n"kind"\n{"kind":3}\n\n' + (LINE % "a").encode())
    assert texts(Tail(path)) == ["a"]


def test_file_that_shrank_is_read_again(tmp_path):
    path = tmp_path / "events"
    path.write_text(LINE % "a" + LINE % "b")
    file = Tail(path)
    texts(file)
    path.write_text(LINE % "c")
    assert texts(file) == ["c"]
    assert file.was_replaced
    assert texts(file) == []
    assert not file.was_replaced


def test_file_that_was_replaced_by_a_longer_one_is_read_again(tmp_path):
    path = tmp_path / "events"
    path.write_text(LINE % "a")
    file = Tail(path)
    texts(file)
    (tmp_path / "other").write_text(LINE % "b" + LINE % "c")
    (tmp_path / "other").replace(path)
    assert texts(file) == ["b", "c"]
    assert file.was_replaced


def test_large_file_is_read_in_pieces(tmp_path):
    path = tmp_path / "events"
    line = LINE % ("x" * 1000)
    path.write_text(line * (CHUNK * 5 // 2 // len(line)))
    file, pieces = Tail(path, chunk=CHUNK), []
    while events := file.events():
        pieces.append(len(events))
    assert len(pieces) == 3
    assert sum(pieces) == path.stat().st_size // len(line)
    assert file.behind == 0


def test_end_of_a_file_alone_is_read_where_only_the_newest_matters(tmp_path):
    path = tmp_path / "events"
    path.write_text("".join(LINE % number for number in range(1000)))
    assert texts(Tail(path, last=60)) == ["998", "999"]


def test_end_of_a_log_begins_with_a_whole_line(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"first line\nsecond \xff\nthird\n")
    assert end_of_file(path, 12) == "third\n"
    assert end_of_file(path, 18) == "second �\nthird\n"
    assert end_of_file(path, 100).startswith("first line\n")
    assert end_of_file(tmp_path / "none", 100) == ""
