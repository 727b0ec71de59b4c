"""`dayfly://` in fsspec: its own suite for reading, refusal of writes, and programs that read by URL."""

import errno
import io
import os

import datasets
import dayfly.fsspec
import fsspec
import pandas
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests
from pyarrow import parquet

# The suite of fsspec makes these trees by writing. Here, its own functions make them in local folders, which are staged in.
SCENARIOS = [
    "bulk_operations_scenario_0",
    "glob_edge_cases_files",
    "dir_and_file_with_same_name_prefix",
    "10_files_with_hashed_names",
]


@pytest.fixture(scope="module")
def scenarios(session, tmp_path_factory):
    """The path of each scenario in the namespace."""
    found = {}
    for name in SCENARIOS:
        local = tmp_path_factory.mktemp(name)
        fs = LocalFileSystem(auto_mkdir=True)
        source = getattr(AbstractFixtures(), f"_{name}")(fs, AbstractFixtures.local_join.__wrapped__(None), str(local))
        session.stage_in(local, f"/dayfly/suite/{name}")
        found[name] = f"/dayfly/suite/{name}/{source.rpartition('/')[2]}"
    return found


class DayflyFixtures(AbstractFixtures):
    """What the suite of fsspec needs to know about this file system."""

    @pytest.fixture
    def fs(self, session):
        return fsspec.filesystem("dayfly")

    @pytest.fixture
    def fs_path(self):
        return "/dayfly/suite"

    @pytest.fixture
    def fs_bulk_operations_scenario_0(self, scenarios):
        return scenarios["bulk_operations_scenario_0"]

    @pytest.fixture
    def fs_glob_edge_cases_files(self, scenarios):
        return scenarios["glob_edge_cases_files"]

    @pytest.fixture
    def fs_dir_and_file_with_same_name_prefix(self, scenarios):
        return scenarios["dir_and_file_with_same_name_prefix"]

    @pytest.fixture
    def fs_10_files_with_hashed_names(self, scenarios):
        return scenarios["10_files_with_hashed_names"]


class TestGet(AbstractGetTests, DayflyFixtures):
    """Copies from the namespace to local folders."""

    def test_get_directory_recursive(self, fs, fs_bulk_operations_scenario_0, tmp_path):
        """As in the suite, which writes the source by means of `fs`: into a new directory, and then into one that exists."""
        source, target = fs_bulk_operations_scenario_0, tmp_path / "target"
        names = {"file1", "file2", "subdir/subfile1", "subdir/subfile2", "subdir/nesteddir/nestedfile"}
        for slash in ("", "/"):
            fs.get(source + slash, f"{target}{slash}", recursive=True)
            assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == names
        fs.get(source, str(target), recursive=True)
        assert (target / os.path.basename(source) / "file1").is_file()


@pytest.fixture
def fs(session):
    return fsspec.filesystem("dayfly")


def test_the_protocol_is_registered(session):
    assert isinstance(fsspec.filesystem("dayfly"), dayfly.fsspec.DayflyFileSystem)
    for url in ("dayfly:///dayfly/train/readme.txt", "dayfly://dayfly/train/readme.txt"):
        with fsspec.open(url) as file:
            assert file.read() == b"not in a class\n"
    with fsspec.open("dayfly:///dayfly/train/readme.txt", "r") as file:
        assert file.read() == "not in a class\n"


def test_files_are_listed_found_and_read(fs, under):
    files = under("/dayfly/train")
    assert sorted(fs.find("/dayfly/train")) == sorted(files)
    assert fs.glob("/dayfly/train/*/0000.bin") == ["/dayfly/train/ant/0000.bin"]
    assert fs.ls("/dayfly/train", detail=False) == [
        f"/dayfly/train/{name}" for name in ("ant", "bee", "cicada", "dayfly", "readme.txt")
    ]
    assert fs.ls("/", detail=False) == ["/dayfly"] and fs.isdir("/")
    assert fs.cat("/dayfly/train/ant", recursive=True) == {
        path: data for path, data in files.items() if path.startswith("/dayfly/train/ant/")
    }
    assert fs.du("/dayfly/train") == sum(map(len, files.values()))
    assert fs.modified("/dayfly/train/readme.txt").tzinfo is not None
    with pytest.raises(FileNotFoundError):
        fs.info("/dayfly/train/none")
    with pytest.raises(FileNotFoundError):
        fs.ls("/dayfly/train/none")
    with pytest.raises(IsADirectoryError):
        fs.open("/dayfly/train")
    assert not fs.exists("/dayfly/train/none")


def test_parts_of_files_are_read(fs, under):
    path = "/dayfly/pairs/x/big.bin"
    data = under("/dayfly/pairs")[path]
    for start, end in [(0, 10), (5_000_000, 5_000_001), (-10, None), (None, -8_999_990), (100, 100), (8, 3), (10**9, None)]:
        assert fs.cat_file(path, start=start, end=end) == data[start:end]
    with fs.open(path) as file:
        assert file.size == len(data)
        for at, length in [(4 << 20, 3), (0, 1), (8_999_999, 5), (100, 5_000_000)]:
            file.seek(at)
            assert file.read(length) == data[at : at + length]
        file.seek(-3, io.SEEK_END)
        assert file.read() == data[-3:] and file.read() == b""
    assert fs.cat_ranges([path, path], [1, 20], [3, 30]) == [data[1:3], data[20:30]]
    assert fs.head(path, 5) == data[:5] and fs.tail(path, 5) == data[-5:]


@pytest.mark.parametrize(
    "write",
    [
        lambda fs, path: fs.open(path, "wb"),
        lambda fs, path: fs.open(path, "ab"),
        lambda fs, path: fs.open(path, "xb"),
        lambda fs, path: fs.pipe(path, b"data"),
        lambda fs, path: fs.touch(path),
        lambda fs, path: fs.mkdir(path),
        lambda fs, path: fs.makedirs(path),
        lambda fs, path: fs.rm(path),
        lambda fs, path: fs.rm_file(path),
        lambda fs, path: fs.rmdir(path),
        lambda fs, path: fs.cp("/dayfly/train/readme.txt", path),
        lambda fs, path: fs.mv("/dayfly/train/readme.txt", path),
        lambda fs, path: fs.put(__file__, path),
    ],
)
def test_writing_fails_as_on_a_read_only_file_system(fs, write):
    with pytest.raises(OSError) as refused:
        write(fs, "/dayfly/train/new")
    assert refused.value.errno == errno.EROFS
    assert fs.exists("/dayfly/train/readme.txt")


def test_pandas_and_pyarrow_read_by_url(session, tmp_path):
    table = pandas.DataFrame({"a": range(1000), "b": [str(number) for number in range(1000)]})
    table.to_parquet(tmp_path / "table.parquet")
    table.to_csv(tmp_path / "table.csv", index=False)
    session.stage_in(tmp_path, "/dayfly/tables")
    assert pandas.read_parquet("dayfly:///dayfly/tables/table.parquet").equals(table)
    assert len(pandas.read_csv("dayfly:///dayfly/tables/table.csv")) == 1000
    column = parquet.read_table("dayfly/tables/table.parquet", filesystem=fsspec.filesystem("dayfly"), columns=["a"])
    assert column.num_rows == 1000


def test_hugging_face_datasets_read_by_url(session, tmp_path):
    source = datasets.Dataset.from_dict({"number": range(1000), "text": [f"text {number}" for number in range(1000)]})
    parts = [source.select(range(0, 600)), source.select(range(600, 1000))]
    for number, part in enumerate(parts):
        part.to_parquet(tmp_path / "hub" / f"part-{number}.parquet")
        part.to_json(tmp_path / "hub" / f"part-{number}.jsonl")
    source.save_to_disk(tmp_path / "hub" / "saved", num_shards=2)
    session.stage_in(tmp_path / "hub", "/dayfly/hub")
    for kind, files in ("parquet", "*.parquet"), ("json", ["part-0.jsonl", "part-1.jsonl"]):
        urls = [f"dayfly:///dayfly/hub/{name}" for name in ([files] if isinstance(files, str) else files)]
        loaded = datasets.load_dataset(kind, data_files=urls, split="train", cache_dir=str(tmp_path / "cache"))
        assert loaded.to_list() == source.to_list()
        streamed = datasets.load_dataset(kind, data_files={"some": urls}, split="some", streaming=True)
        assert list(streamed.shuffle(seed=1, buffer_size=50).take(20)) != source.to_list()[:20]
        assert list(streamed) == source.to_list()
    saved = datasets.load_from_disk("dayfly:///dayfly/hub/saved")
    assert saved.to_list() == source.to_list()
