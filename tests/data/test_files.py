"""Reading of lines, errors of bad files, and complete writes."""

import gzip
import io
import os
import stat
import sys

import pytest

from hf_vanilla.command_line.options import on_first_process
from hf_vanilla.data.files import read_lines, replacing_file


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n\n b \n", ["a", "", " b "]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\rb\n", ["a\rb"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"a\x00b\n", ["a\x00b"]),
        ("a\u2028b\x85c\x0cd\n".encode(), ["a\u2028b\x85c\x0cd"]),
    ],
    ids=["nothing", "empty line", "no end", "spaces", "CRLF", "CR", "byte order mark", "NUL", "other breaks"],
)
@pytest.mark.parametrize("kind", ["file", "gz", "stdin"])
def test_lines_of_a_file(tmp_path, monkeypatch, kind, content, expected):
    path = tmp_path / ("text.gz" if kind == "gz" else "text")
    path.write_bytes(gzip.compress(content) if kind == "gz" else content)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    assert read_lines("-" if kind == "stdin" else str(path)) == expected


@pytest.mark.promise("odd text")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin", b"a\n\xc3\xa4\n\xe4 b\n", r"latin must be UTF-8, but line 3 is not: .* at byte 0 .*\(0xe4\)"),
        ("surrogate", b"a\xed\xa0\x80\n", "surrogate must be UTF-8, but line 1 is not"),
        ("text.gz", b"plain text", "text.gz must be a complete gzip file"),
        ("cut.gz", gzip.compress(b"a\n" * 999, mtime=0)[:-9], "cut.gz must be a complete gzip file"),
    ],
)
def test_bad_bytes_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_lines(str(tmp_path / name))


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="nothing can't be read: No such file or directory"):
        read_lines(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="can't be read: Is a directory"):
        read_lines(str(tmp_path))


def test_standard_input_is_named(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    with pytest.raises(ValueError, match="standard input must be UTF-8, but line 1 is not"):
        read_lines("-")


def test_file_appears_when_complete(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    with replacing_file(str(path)) as file:
        file.write("größe\n")
        assert path.read_text() == "old"
    assert path.read_bytes() == "größe\n".encode()
    assert os.listdir(tmp_path) == ["out"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def write_half(path, error):
    with replacing_file(str(path)) as file:
        file.write("half")
        raise error("in between")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
@pytest.mark.parametrize("existed", [True, False], ids=["old", "new"])
def test_interrupted_write_leaves_nothing(tmp_path, existed, error):
    path = tmp_path / "out"
    if existed:
        path.write_text("old")
    with pytest.raises(error, match="in between"):
        write_half(path, error)
    assert os.listdir(tmp_path) == (["out"] if existed else [])
    assert not existed or path.read_text() == "old"


def test_links_are_followed(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replacing_file(str(tmp_path / "link")) as file:
        file.write("new")
    assert (tmp_path / "real").read_text() == "new"
    assert (tmp_path / "link").is_symlink()


def test_devices_are_written_directly():
    with replacing_file(os.devnull) as file:
        file.write("x")
    assert not os.path.isfile(os.devnull)


@pytest.mark.skipif(not os.path.exists("/dev/fd"), reason="this system has no names of open files")
def test_pipes_are_written_directly():
    reading, writing = os.pipe()
    with replacing_file(f"/dev/fd/{writing}") as file:
        file.write("x\n")
    os.close(writing)
    with open(reading) as file:
        assert file.read() == "x\n"


@pytest.mark.parametrize(
    ("place", "message"),
    [("missing/out", "missing/out can't be written: No such file or directory"), (".", "can't be written: Is a dir")],
)
def test_unwritable_file_is_rejected_before_the_block(tmp_path, place, message):
    with pytest.raises(ValueError, match=message), replacing_file(str(tmp_path / place)):
        pytest.fail("the work has begun")
    assert os.listdir(tmp_path) == []


def test_standard_output_is_utf_8(capfdbinary):
    with replacing_file("-") as file:
        file.write("größe\n")
    assert capfdbinary.readouterr().out == "größe\n".encode()


def test_single_process_is_the_first():
    assert on_first_process(lambda: [1, 2]) == [1, 2]

    def fail():
        raise ValueError("line 3")

    with pytest.raises(ValueError, match="line 3"):
        on_first_process(fail)
