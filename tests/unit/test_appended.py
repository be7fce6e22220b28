"""Files that other processes write while a test reads them."""

from __future__ import annotations

from pathlib import Path

from tests.appended import append, read


def test_lines_are_read_as_they_were_written(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append(file, {"at": 1.5, "job": "é"})
    append(file, {"at": 2.0})
    assert read(file) == [{"at": 1.5, "job": "é"}, {"at": 2.0}]


def test_incomplete_line_is_left_for_later(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    append(file, {"at": 1.5})
    with file.open("a") as writer:
        writer.write('{"at"')
        writer.flush()
        assert read(file) == [{"at": 1.5}]
        writer.write(": 2.0}\n")
    assert read(file) == [{"at": 1.5}, {"at": 2.0}]
