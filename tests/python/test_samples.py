"""`dayfly.Samples` without PyTorch, parts of it, and folders and tars that are read without a session."""

import errno
import itertools
import os
import pickle
import subprocess
import sys
import tarfile
import warnings

import dayfly
import dayfly.torch
import numpy as np
import pytest
import torch
from dayfly.torch import Sampler
from helpers import first, ranks
from torch.utils.data import DataLoader, Subset


def test_samples_need_no_pytorch(session):
    code = "import sys, dayfly; s = dayfly.Samples('/dayfly/train', transform=len); print(sum(s._getitems(range(len(s)))), sum(s), 'torch' in sys.modules)"
    printed = subprocess.check_output([sys.executable, "-c", code]).split()
    total = dayfly.Samples("/dayfly/train").sizes.sum()
    assert printed == [b"%d" % total, b"%d" % total, b"False"]
    assert issubclass(dayfly.torch.Samples, (dayfly.Samples, torch.utils.data.Dataset))


def test_three_lines_train(session, under):
    samples = dayfly.Samples("/dayfly/train")
    sampler = dayfly.torch.Sampler(samples, shuffle="partial", q=0.3, seed=1)
    loader = dayfly.torch.loader(samples, sampler, batch_size=32, num_workers=2, collate_fn=first)
    assert sorted(data for batch in loader for data in batch) == sorted(under("/dayfly/train").values())


def test_numbers_of_other_libraries_are_numbers(session):
    samples = dayfly.Samples("/dayfly/train")
    expected = list(Sampler(samples, shuffle="partial", q=0.5, batch_size=10, seed=3))
    sampler = Sampler(samples, shuffle="partial", q=np.float32(0.5), batch_size=np.int64(10), seed=torch.tensor(3), rank=np.int8(0), num_replicas=np.int8(1))
    sampler.set_epoch(np.int32(0))
    assert list(sampler) == expected
    assert list(Sampler(samples, sampler=[np.int64(3), torch.tensor(5)])) == [3, 5]
    for wrong, error in [(5, TypeError), ([1.5], TypeError), ([True], TypeError), ([2**70], IndexError)]:
        with pytest.raises(error):
            list(Sampler(samples, sampler=wrong))
    with pytest.raises(ValueError, match="sampler is of other samples"):
        dayfly.torch.loader(samples, Sampler(samples.filter(range(5))))


def test_a_loader_tells_the_sampler_its_batch_size(session):
    samples = dayfly.Samples("/dayfly/train")
    given = ranks(samples, 3, shuffle="partial", q=0.3, batch_size=20)
    told = ranks(samples, 3, shuffle="partial", q=0.3)
    for sampler in told:
        for use in (lambda it=sampler: list(it), sampler.state_dict, lambda it=sampler: it.load_state_dict(given[0].state_dict())):
            with pytest.raises(ValueError, match="needs batch_size="):
                use()
        dayfly.torch.loader(samples, sampler, batch_size=20)
    assert [list(sampler) for sampler in told] == [list(sampler) for sampler in given]


# ---- Parts ----


def test_filter_keeps_some_items(session, under):
    samples = dayfly.Samples("/dayfly/train", labeled=True)
    for chosen in (samples.targets == 2, np.flatnonzero(samples.targets == 2), torch.from_numpy(np.flatnonzero(samples.targets == 2))):
        part = samples.filter(chosen)
        assert len(part) == 150 and part.classes == samples.classes and set(part.targets.tolist()) == {2}
        assert [part[k] for k in (0, 7, -1)] == [samples[int(k)] for k in np.flatnonzero(samples.targets == 2)[[0, 7, -1]]]
        assert list(part.paths) == [path for path, target in zip(samples.paths, samples.targets) if target == 2]
        assert part.sizes.tolist() == samples.sizes[samples.targets == 2].tolist()
    assert len(samples) == 601 and samples[0] == dayfly.Samples("/dayfly/train", labeled=True)[0]
    some = samples.filter([-1, 3, 3])
    assert [some[k] for k in range(len(some))] == [samples[3], samples[-1]]
    for kind in (np.int8, np.uint8, np.int16, np.uint64):
        assert samples.filter(np.array([100, 3], kind)).fingerprint == samples.filter([3, 100]).fingerprint
    assert samples.filter(range(601)).fingerprint == samples.fingerprint != samples.filter(range(600)).fingerprint
    assert samples.filter(range(100)).filter([5, 7]).fingerprint == samples.filter([5, 7]).fingerprint
    with pytest.raises(ValueError, match="read-only"):
        samples.targets[0] = 1
    assert len(samples.filter([])) == 0 and list(Sampler(samples.filter([]))) == []
    # Parts of parts, in another process, too.
    part = samples.filter(samples.targets >= 0).filter(range(0, 600, 7))
    copied = pickle.loads(pickle.dumps(part))
    assert copied.__getitems__(range(86)) == part.__getitems__(range(86)) and copied.fingerprint == part.fingerprint


def test_parts_of_groups(session):
    samples = dayfly.Samples("/dayfly/pairs", group="stem")
    part = samples.filter([10, 3])
    assert [part[k] for k in range(2)] == [samples[3], samples[10]]
    assert pickle.loads(pickle.dumps(part))[1] == samples[10]


@pytest.mark.parametrize(
    ("chosen", "error", "message"),
    [
        ([True, False], ValueError, "the mask has 2 values, but there are 601 samples"),
        ([601], IndexError, "there is no sample 601; there are 601 samples"),
        ([-602], IndexError, "there is no sample -1"),
        ([0.5], TypeError, "expected a mask or numbers of items, not an array of float64"),
        (["a"], TypeError, "expected a mask or numbers of items"),
        ([[1], [2]], ValueError, "in one dimension, not in 2"),
        ({1, 2}, TypeError, "expected an array or a list of truth values"),
        ((k for k in range(3)), TypeError, "expected an array or a list of truth values"),
    ],
)
def test_what_chooses_no_items_is_refused(session, chosen, error, message):
    with pytest.raises(error, match=message):
        dayfly.Samples("/dayfly/train").filter(chosen)


@pytest.mark.parametrize("shuffle", ["global", "local", "partial"])
def test_ranks_share_a_part_and_resume_it(session, shuffle):
    samples = dayfly.Samples("/dayfly/train")
    part = samples.filter(samples.targets != 0)
    more = {"q": 0.3, "batch_size": 10} if shuffle == "partial" else {}
    shares = [list(sampler) for sampler in ranks(part, 4, shuffle=shuffle, tail="exact", **more)]
    assert sorted(np.concatenate(shares)) == list(range(len(part)))
    begun = ranks(part, 4, shuffle=shuffle, tail="exact", **more)
    read = [list(itertools.islice(sampler, 30)) for sampler in begun]
    resumed = ranks(part, 2, shuffle=shuffle, tail="exact", **more)
    for sampler in resumed:
        sampler.load_state_dict(begun[0].state_dict())
    assert sorted(itertools.chain(*read, *resumed)) == list(range(len(part)))
    with pytest.raises(ValueError, match="is of other samples than"):
        ranks(samples, 1, shuffle=shuffle, **more)[0].load_state_dict(begun[0].state_dict())


# ---- Without a session ----


@pytest.fixture
def plain(content, tmp_path, monkeypatch):
    """A machine without a session. A folder and a tar with the files of /dayfly/train."""
    for path, data in content.items():
        if path.startswith("train/"):
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
    (tmp_path / "train/link").symlink_to("readme.txt")
    os.link(tmp_path / "train/readme.txt", tmp_path / "train/same.txt")
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        # A later member of the same name wins.
        archive.addfile(tarfile.TarInfo("./ant/0000.bin"))
        archive.add(tmp_path / "train", ".")
    (tmp_path / "none").mkdir()
    monkeypatch.setenv("DAYFLY_RUNTIME_DIR", str(tmp_path / "none"))
    return tmp_path


def quietly(path, **arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dayfly.Samples(path, **arguments)


@pytest.mark.parametrize("source", ["train", "train.tar"])
def test_a_script_runs_without_a_session(plain, under, source):
    files = under("/dayfly/train")
    root = str(plain / source)
    with pytest.warns(RuntimeWarning, match="is read directly, and not through Dayfly") as warned:
        samples = dayfly.Samples(root, labeled=True)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert {os.path.relpath(path, root): samples[k][0] for k, path in enumerate(samples.paths)} == {
        path.removeprefix("/dayfly/train/"): data for path, data in files.items()
    }
    assert samples.classes == ["ant", "bee", "cicada", "dayfly"] and np.bincount(samples.targets + 1).tolist() == [1, 150, 150, 150, 150]
    for arguments in ({}, {"shuffle": "local"}, {"shuffle": "partial", "q": 0.5}):
        sampler = Sampler(samples, tail="exact", **arguments)
        loader = dayfly.torch.loader(samples, sampler, batch_size=32, num_workers=1, multiprocessing_context="spawn", collate_fn=first)
        assert sorted(data for batch in loader for data, _ in batch) == sorted(files.values())
    shares = [list(sampler) for sampler in ranks(samples, 4, shuffle="partial", q=0.3, batch_size=10, tail="exact")]
    assert sorted(sum(shares, [])) == list(range(601))
    loader = dayfly.torch.prefetch(DataLoader(samples, batch_size=32, shuffle=True, collate_fn=first))
    assert sum(map(len, loader)) == 601
    assert len(samples.filter(samples.targets == 1)) == len(Subset(samples, range(150)))
    view = quietly(root, views=True)[5]
    assert torch.from_dlpack(view).numpy().tobytes() == view.tobytes() == bytes(view) == samples[5][0] and view.is_good


def test_epochs_of_a_folder_repeat_and_resume(plain):
    samples = quietly(str(plain / "train"))
    whole = [list(Sampler(samples, seed=3)), list(Sampler(samples, seed=3))]
    assert whole[0] == whole[1] != list(Sampler(samples, seed=4))
    loader = dayfly.torch.loader(samples, Sampler(samples, seed=3), batch_size=10, collate_fn=first)
    for _step, _batch in zip(range(5), loader):
        state = loader.state_dict()
    # The tar has the same files.
    resumed = Sampler(quietly(str(plain / "train.tar")), seed=3)
    with pytest.raises(ValueError, match="is of other samples than"):
        Sampler(quietly(str(plain / "train/ant")), seed=3).load_state_dict(state)
    resumed.load_state_dict(state)
    assert list(resumed) == whole[0][state["delivered"] :]


def test_groups_of_a_folder(plain, content):
    for path in ("pairs/x/000.jpg", "pairs/x/000.json"):
        (plain / path).parent.mkdir(parents=True, exist_ok=True)
        (plain / path).write_bytes(content[path])
    samples = quietly(str(plain / "pairs"), group="stem")
    assert samples[0] == {"__key__": "x/000", "jpg": content["pairs/x/000.jpg"], "json": b'{"number": 0}'}


def test_files_that_change_are_errors(plain, monkeypatch):
    monkeypatch.chdir(plain)
    folder, archive = quietly("train"), quietly("train.tar")
    monkeypatch.chdir("/")
    item = list(folder.paths).index("train/readme.txt")
    assert folder[item] == archive[item] == b"not in a class\n"
    for content in (b"short", b"much longer than before"):
        (plain / "train/readme.txt").write_bytes(content)
        with pytest.raises(OSError, match="another size than when it was listed") as failure:
            folder[item]
        assert (failure.value.errno, failure.value.filename) == (errno.ESTALE, "train/readme.txt")
    (plain / "train/readme.txt").unlink()
    os.mkfifo(plain / "train/readme.txt")
    with pytest.raises(OSError, match="another size"):
        folder[item]
    (plain / "train/readme.txt").unlink()
    with pytest.raises(FileNotFoundError):
        folder[item]
    os.utime(plain / "train.tar", ns=(0, 0))
    with pytest.raises(OSError, match="the tar has changed since it was listed"):
        archive[item]


def test_a_path_outside_the_namespace_is_read_directly(session, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"content")
    with pytest.warns(RuntimeWarning, match="it is not below /dayfly"):
        assert dayfly.Samples(str(tmp_path))[0] == b"content"
    with pytest.raises(FileNotFoundError):
        dayfly.Samples(str(tmp_path), session=dayfly.attach())


def test_what_cannot_be_read_without_a_session_is_named(plain):
    with pytest.raises(dayfly.Error, match="'/dayfly/train' does not exist here, and there is no session to read it from"):
        dayfly.Samples(b"/dayfly/train")
    packed = plain / "train.tar.gz"
    with tarfile.open(packed, "w:gz") as archive:
        archive.add(plain / "train", ".")
    (plain / "notes.txt").write_text("no tar\n" * 100)
    (plain / "empty").write_bytes(b"")
    with tarfile.open(plain / "outside.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../x"))
    with tarfile.open(plain / "cut.tar", "w") as archive:
        archive.add(plain / "train", ".")
    os.truncate(plain / "cut.tar", 100_000)
    bad = bytearray((plain / "train.tar").read_bytes())
    bad[tarfile.open(plain / "train.tar").getmembers()[5].offset] ^= 1
    (plain / "bad.tar").write_bytes(bad)
    subprocess.check_call(["tar", "-C", plain, "-g", plain / "snapshot", "-cf", plain / "incremental.tar", "train"])
    for name, message in [
        ("bad.tar", "is damaged at byte"),
        ("incremental.tar", "members of an incremental backup, which are read in a session only"),
        ("train.tar.gz", "neither a folder nor a plain tar .*start one with dayfly.session"),
        ("notes.txt", "neither a folder nor a plain tar"),
        ("empty", "neither a folder nor a plain tar"),
        ("outside.tar", "a member outside of it: '../x'"),
        ("cut.tar", "neither a folder nor a plain tar"),
    ]:
        with pytest.raises(dayfly.Error, match=message):
            quietly(str(plain / name))
