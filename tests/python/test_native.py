"""The native module: every function, with good and with hostile arguments, in forked and spawned processes, with and without the
preload library, and while the session ends."""

import array
import gc
import io
import multiprocessing
import os
import pickle
import random
import signal
import stat
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import dayfly
import pytest
from dayfly import _dayfly

TRAIN = "/dayfly/train"
PROGRAM = os.environ.get("DAYFLY_PROGRAM", str(Path(sysconfig.get_path("scripts")) / "dayfly"))


@pytest.fixture
def attached(session):
    return dayfly.attach(session.id)


@pytest.fixture
def train(attached):
    return attached.dataset(TRAIN)


@pytest.fixture
def expected(under, train):
    """The content of each sample, by id."""
    files = under(TRAIN)
    return [files[path] for path in train.paths()]


def run(code, session, *, preload=False, node=0, check=True):
    """Runs a program in a process of its own, if wanted below `dayfly exec`."""
    environment = {**os.environ, "DAYFLY_SESSION": session.id, "DAYFLY_NODE": str(node)}
    command = [sys.executable, "-c", code]
    if preload:
        command = [PROGRAM, "exec", "--node", str(node), "--", *command]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    if check:
        assert done.returncode == 0, done.stderr
    return done


# Attaching.


def test_a_process_attaches_once_to_each_node(session, attached):
    assert attached == dayfly.attach(session.id) and hash(attached) == hash(dayfly.attach(session.id))
    assert (attached.id, attached.node, attached.nodes, attached.prefix) == (session.id, 0, 3, "/dayfly")
    assert dayfly.attach(session.id, 2).node == 2 and dayfly.attach(session.id, 2) != attached
    assert not attached.is_gone
    assert dayfly.attach().id == session.id, "there is only one session"
    folder = Path(os.environ["DAYFLY_RUNTIME_DIR"]) / f"dayfly-{os.getuid()}" / session.id
    assert dayfly.attach(str(folder)) == attached


@pytest.mark.parametrize("name", ["0123456789abcdef", "no id", "", "/tmp/none/0123456789abcdef", "\0", "é"])
def test_sessions_that_do_not_exist_are_errors(session, name):
    with pytest.raises((dayfly.Error, ValueError)):
        dayfly.attach(name)


def test_nodes_that_do_not_exist_are_errors(session):
    with pytest.raises(dayfly.Error):
        dayfly.attach(session.id, 77)
    for wrong in (-1, 1 << 16, "0"):
        with pytest.raises((OverflowError, TypeError)):
            dayfly.attach(session.id, wrong)


# Names.


def test_stat_is_what_was_staged_in(attached, under):
    for path, data in list(under(TRAIN).items())[:50]:
        found = attached.stat(path)
        assert found.st_size == len(data) and found.is_file() and stat.S_ISREG(found.st_mode)
        assert found.st_uid == os.geteuid() and found.st_gid == os.getegid()
        assert found.st_mtime == pytest.approx(found.st_mtime_ns / 1e9)
    assert attached.stat("/dayfly").is_dir() and attached.lstat(b"/dayfly/train").is_dir()
    assert attached.stat(Path("/dayfly/train/ant")).is_dir()


def test_directories_are_listed(attached):
    entries = {entry.name: entry for entry in attached.list(TRAIN)}
    assert sorted(entries) == ["ant", "bee", "cicada", "dayfly", "readme.txt"]
    assert entries["ant"].is_dir() and entries["readme.txt"].is_file() and entries["ant"].path == "/dayfly/train/ant"
    assert os.fspath(entries["ant"]) == "/dayfly/train/ant"
    assert {"/dayfly/pairs", "/dayfly/train"} <= set(attached.datasets())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/dayfly/none", FileNotFoundError),
        ("/etc/passwd", FileNotFoundError),
        ("relative", FileNotFoundError),
        ("/dayfly/train/readme.txt/x", NotADirectoryError),
        ("/dayfly/" + "x" * 5000, OSError),
        (b"/dayfly/\xff\xfe", FileNotFoundError),
    ],
)
def test_wrong_paths_raise_what_the_kernel_would(attached, path, kind):
    for call in (attached.stat, attached.lstat, attached.read, attached.list, attached.readlink, attached.dataset):
        with pytest.raises(kind) as raised:
            call(path)
        assert raised.value.errno and raised.value.strerror
        assert raised.value.filename == os.fsdecode(path)


def test_a_directory_cannot_be_read_and_a_file_cannot_be_listed(attached):
    with pytest.raises(IsADirectoryError):
        attached.read(TRAIN)
    with pytest.raises(NotADirectoryError):
        attached.list(f"{TRAIN}/readme.txt")
    with pytest.raises(dayfly.Error):
        attached.dataset("/dayfly")


@pytest.mark.parametrize("wrong", [None, 7, 1.5, [], object()])
def test_wrong_types_are_type_errors(attached, train, wrong):
    for call in (attached.stat, attached.read, attached.list, attached.dataset, train.id_of):
        with pytest.raises(TypeError):
            call(wrong)


# Whole files.


def test_files_are_read(attached, under):
    files = under(TRAIN) | under("/dayfly/pairs")
    assert attached.read_many(list(files)) == list(files.values())
    big = "/dayfly/pairs/x/big.bin"
    assert attached.read(big) == files[big]
    assert attached.read_range(big, 5_000_000, 100) == files[big][5_000_000:5_000_100]
    assert attached.read_range(big, len(files[big]) - 3, 100) == files[big][-3:]
    assert attached.read_range(big, 1 << 40, 100) == b""
    with pytest.raises(OverflowError):
        attached.read_range(big, -1, 1)
    with pytest.raises(FileNotFoundError) as missing:
        attached.read_many(["/dayfly/train/readme.txt", "/dayfly/train/none"])
    assert missing.value.filename == "/dayfly/train/none"
    with pytest.raises(TypeError):
        attached.read_many("/dayfly/train/readme.txt")
    assert attached.read_many([]) == []


# Datasets.


def test_ids_paths_and_sizes_agree(train, under):
    files = under(TRAIN)
    paths = train.paths()
    assert sorted(paths) == sorted(files) and len(train) == len(files) == len(paths)
    assert [train.id_of(path) for path in paths] == list(range(len(train)))
    assert train.id_of("ant/0000.bin") == train.id_of("/dayfly/train/bee/../ant/./0000.bin")
    assert [train.path_of(id) for id in range(len(train))] == paths
    assert train.names([3, 1]) == [os.path.basename(paths[3]), os.path.basename(paths[1])]
    assert train.sizes().tolist() == [len(files[path]) for path in paths]
    assert train.total_size == sum(train.sizes())
    with pytest.raises(FileNotFoundError):
        train.id_of("ant/none")
    with pytest.raises(IsADirectoryError):
        train.id_of("ant")
    with pytest.raises(FileNotFoundError):
        train.id_of("/dayfly/pairs/x/000.jpg")


def test_directories_group_the_samples(train):
    indices, names = train.directories()
    assert names == ["", "ant", "bee", "cicada", "dayfly/a", "dayfly/b"]
    relative = [path.removeprefix(TRAIN + "/") for path in train.paths()]
    assert [names[index] for index in indices] == [os.path.dirname(path) for path in relative]


def test_each_sample_has_one_owner(session, train):
    owners = train.owners().tolist()
    assert set(owners) == {0, 1, 2}
    by_node = [dayfly.attach(session.id, node).dataset(TRAIN).local_ids().tolist() for node in range(3)]
    assert sorted(sum(by_node, [])) == list(range(len(train)))
    for node, ids in enumerate(by_node):
        assert {owners[id] for id in ids} == {node}
        assert sorted(train.local_ids(node)) == sorted(ids)
        on_disk = [id for id in ids if train.sizes()[id] > 0]
        assert set(dayfly.attach(session.id, node).dataset(TRAIN).is_here(on_disk)) <= {1}


def test_epochs_are_permutations_that_all_nodes_share(session, train):
    one = train.epoch_ids(7, 1).tolist()
    assert sorted(one) == list(range(len(train)))
    assert one != train.epoch_ids(7, 2).tolist()
    assert one == dayfly.attach(session.id, 1).dataset(TRAIN).epoch_ids(7, 1).tolist()
    assert train.epoch_ids((1 << 64) - 1, 0)
    for wrong in (-1, 1 << 64):
        with pytest.raises(OverflowError):
            train.epoch_ids(wrong, 0)


def test_the_fingerprint_depends_on_the_content_only(session, train, tmp_path):
    def stage(name, content, **options):
        folder = tmp_path / name
        folder.mkdir()
        for path, data in content.items():
            (folder / path).write_bytes(data)
        session.stage_in(folder, f"/dayfly/{name}", **options)
        return dayfly.attach(session.id).dataset(f"/dayfly/{name}").fingerprint

    content = {"a": b"1", "b": b"", "c": b"3" * 10_000}
    first = stage("first", content)
    assert first == stage("second", content) and len(first) == 32
    assert first != stage("third", content | {"a": b"2"})
    assert first != stage("fourth", {"a": b"1", "b": b"", "d": b"3" * 10_000})
    assert first != stage("fifth", content, group="stem"), "the order of an epoch is another one"
    assert train.fingerprint == train.fingerprint


def test_arrays_are_seen_without_a_copy(train):
    numpy = pytest.importorskip("numpy")
    for numbers, kind in ((train.epoch_ids(1, 1), "uint32"), (train.sizes(), "uint64"), (train.owners(), "uint16")):
        seen = numpy.asarray(numbers)
        assert seen.dtype == kind and seen.tolist() == numbers.tolist() == list(numbers)
        assert not seen.flags.writeable and not seen.flags.owndata
        view = memoryview(numbers)
        assert view.readonly and view.format == numbers.typecode and view.tolist() == numbers.tolist()
        assert numbers[-1] == numbers[len(numbers) - 1]
        for wrong in (len(numbers), -len(numbers) - 1):
            with pytest.raises(IndexError):
                numbers[wrong]
        with pytest.raises(TypeError):
            io.BytesIO(b"x" * 4).readinto(numbers)
        assert "dayfly.Array" in repr(numbers)


@pytest.mark.parametrize("form", ["list", "tuple", "range", "generator", "array", "numpy", "strided", "torch", "dayfly"])
def test_ids_come_in_any_form(train, expected, form):
    ids = {
        "list": lambda: [5, 3, 3, 0],
        "tuple": lambda: (5, 3, 3, 0),
        "range": lambda: range(4),
        "generator": lambda: (id for id in (5, 3)),
        "array": lambda: array.array("I", [5, 3, 3, 0]),
        "numpy": lambda: pytest.importorskip("numpy").array([5, 3, 3, 0]),
        "strided": lambda: pytest.importorskip("numpy").arange(20)[::-5],
        "torch": lambda: pytest.importorskip("torch").tensor([5, 3, 3, 0]),
        "dayfly": lambda: train.epoch_ids(1, 1),
    }[form]
    chosen = [int(id) for id in ids()]
    assert train.read_each(ids()) == [expected[id] for id in chosen]
    assert train.paths(ids()) == [train.path_of(id) for id in chosen]
    assert [view.tobytes() for view in train.views(ids())] == [expected[id] for id in chosen]


@pytest.mark.parametrize("wrong", [[-1], [1 << 31], [1 << 32], [1 << 64], [-(1 << 70)], [601], range(10**6, 10**6 + 2)])
def test_ids_out_of_range_are_index_errors(train, wrong):
    calls = (train.read, train.read_each, train.views, train.order, train.paths, train.sizes, train.is_here, train.names)
    for call in calls:
        with pytest.raises(IndexError):
            call(wrong)
    for call in (train.path_of, train.read_one):
        with pytest.raises(IndexError):
            call(wrong[0])


@pytest.mark.parametrize("wrong", ["12", b"12", [1.5], [None], ["1"], 3, [True], object(), [[1]], {1: object()}.values()])
def test_ids_that_are_no_integers_are_type_errors(train, wrong):
    for call in (train.read, train.read_each, train.views, train.order, train.sizes):
        with pytest.raises(TypeError):
            call(wrong)


def test_arrays_of_ids_with_two_dimensions_are_refused(train):
    numpy = pytest.importorskip("numpy")
    with pytest.raises(ValueError, match="2 dimensions"):
        train.read_each(numpy.zeros((2, 2), dtype="int64"))
    with pytest.raises(TypeError):
        train.read_each(numpy.zeros(2))


# Reading.


def test_samples_are_read_into_one_buffer(train, expected):
    ids = random.Random(1).sample(range(len(train)), 200)
    buffer, offsets = train.read(ids)
    assert isinstance(buffer, bytearray) and offsets[0] == 0 and offsets[200] == len(buffer)
    for at, id in enumerate(ids):
        assert buffer[offsets[at] : offsets[at + 1]] == expected[id]
    own = bytearray(len(buffer) + 100)
    same, offsets = train.read(ids, into=own)
    assert same is own and own[: offsets[200]] == buffer and not any(own[offsets[200] :])
    assert train.read([]) [0] == b"" and train.read_each([]) == [] and train.views([]) == []


def test_buffers_that_cannot_be_filled_are_refused(train):
    numpy = pytest.importorskip("numpy")
    ids = [id for id in range(len(train)) if train.sizes()[id] > 100][:3]
    for wrong in (bytearray(10), bytes(10_000_000), numpy.zeros(10_000_000, dtype="u1")[::2]):
        with pytest.raises(ValueError):
            train.read(ids, into=wrong)
    with pytest.raises(TypeError):
        train.read(ids, into=7)
    floats = numpy.zeros(1_000_000)
    assert train.read(ids, into=floats)[0] is floats


def test_all_nodes_read_all_samples(session, expected):
    for node in range(3):
        dataset = dayfly.attach(session.id, node).dataset(TRAIN)
        assert dataset.read_each(range(len(dataset))) == expected
        assert [dataset.read_one(id) for id in range(0, len(dataset), 7)] == expected[::7]


def test_samples_of_several_chunks_are_read(attached, under):
    pairs = attached.dataset("/dayfly/pairs")
    big = pairs.id_of("x/big.bin")
    data = under("/dayfly/pairs")["/dayfly/pairs/x/big.bin"]
    assert pairs.read_one(big) == data and pairs.read_each([big, big]) == [data, data]
    assert bytes(pairs.views([big])[0]) == data


def test_threads_read_at_the_same_time(session, train, expected):
    failures = []

    def work(seed):
        node = dayfly.attach(session.id, seed % 3).dataset(TRAIN)
        for _ in range(10):
            ids = random.Random(seed).sample(range(len(train)), 50)
            if node.read_each(ids) != [expected[id] for id in ids]:
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_orders_are_announced_and_end(attached, train):
    with train.order(train.epoch_ids(1, 1)) as order:
        assert len(order) == len(train)
    order.end()
    paths = train.paths([3, 2, 1])
    assert len(attached.order_paths(paths)) == 3
    with pytest.raises(OSError, match="another dataset"):
        attached.order_paths([paths[0], "/dayfly/pairs/x/000.jpg"])
    with pytest.raises(FileNotFoundError):
        attached.order_paths(["/dayfly/train/none"])


# Views.


def test_views_lend_bytes_in_place(train, expected):
    ids = [id for id in range(len(train)) if len(expected[id]) > 0][:64]
    for view, id in zip(train.views(ids), ids):
        seen = memoryview(view)
        assert seen == expected[id] and seen.readonly and len(view) == len(expected[id])
        assert view.is_good and view.id == id and view.dataset is train
        with pytest.raises(BufferError):
            view.release()
        seen.release()
        view.release()
        view.release()
        assert not view.is_good
        for use in (lambda view=view: memoryview(view), view.tobytes, lambda view=view: len(view)):
            with pytest.raises((dayfly.Error, BufferError)):
                use()


def test_a_memoryview_keeps_the_bytes(train, expected):
    seen = [memoryview(view) for view in train.views(range(100))]
    gc.collect()
    assert [bytes(view) for view in seen] == expected[:100]


def test_a_view_ends_with_its_block(train, expected):
    with train.views([1])[0] as view:
        assert view.tobytes() == expected[1]
    with pytest.raises(dayfly.Error, match="released"):
        view.tobytes()


def test_tensors_keep_the_bytes(session, expected):
    torch = pytest.importorskip("torch")
    numpy = pytest.importorskip("numpy")
    for node in range(3):
        dataset = dayfly.attach(session.id, node).dataset(TRAIN)
        ids = [id for id in range(len(dataset)) if len(expected[id]) > 0][:100]
        views = dataset.views(ids)
        tensors = [torch.from_dlpack(view) for view in views]
        arrays = [numpy.from_dlpack(view) for view in views]
        with pytest.raises(BufferError):
            views[0].release()
        del views
        gc.collect()
        assert all(not array.flags.writeable for array in arrays)
        for tensor, seen, id in zip(tensors, arrays, ids):
            assert tensor.dtype == torch.uint8 and tensor.numpy().tobytes() == expected[id] == seen.tobytes()


def test_an_unused_capsule_ends_its_export(train):
    view = train.views([5])[0]
    assert view.__dlpack_device__() == (1, 0)
    for arguments in ({}, {"max_version": (1, 0)}, {"copy": True, "max_version": (1, 1)}):
        capsule = view.__dlpack__(**arguments)
        del capsule
        gc.collect()
    with pytest.raises(BufferError):
        view.__dlpack__(dl_device=(2, 0))
    view.release()


def test_many_held_views_do_not_stop_reading(session, expected):
    for node in range(3):
        dataset = dayfly.attach(session.id, node).dataset(TRAIN)
        held = [dataset.views([id % len(dataset)])[0] for id in range(2_000)]
        assert all(view.tobytes() == expected[view.id] for view in held)
        assert all(view.is_good for view in held)
        descriptors = len(os.listdir("/proc/self/fd"))
        assert descriptors < 400, "each held view must not cost a descriptor"


def test_leases_do_not_leak(session, expected):
    dataset = dayfly.attach(session.id, 1).dataset(TRAIN)
    before = len(os.listdir("/proc/self/fd"))
    for epoch in range(1_000):
        ids = [(epoch * 7 + at) % len(dataset) for at in range(16)]
        views = dataset.views(ids)
        if epoch % 50 == 0:
            assert [view.tobytes() for view in views] == [expected[id] for id in ids]
    del views
    assert len(os.listdir("/proc/self/fd")) <= before + 8


# Other processes.


def child_reads(sender, dataset, ids):
    sender.send((dataset.session.node, dataset.read_each(ids), [view.tobytes() for view in dataset.views(ids)]))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_use_the_session(session, expected, method):
    context = multiprocessing.get_context(method)
    for node in (0, 2):
        dataset = dayfly.attach(session.id, node).dataset(TRAIN)
        ids = list(range(0, len(dataset), 3))
        dataset.read_each(ids)
        receiver, sender = context.Pipe()
        child = context.Process(target=child_reads, args=(sender, dataset, ids))
        child.start()
        assert receiver.poll(60), "the child has not answered"
        used, read, seen = receiver.recv()
        child.join(30)
        assert child.exitcode == 0 and used == node
        assert read == seen == [expected[id] for id in ids]
        assert dataset.read_each(ids) == read, "the parent goes on"


def test_a_forked_child_reads_while_its_parent_holds_views(session, expected):
    dataset = dayfly.attach(session.id, 1).dataset(TRAIN)
    ids = list(range(50))
    views = dataset.views(ids)
    child = os.fork()
    if child == 0:
        good = [view.tobytes() for view in views] == [expected[id] for id in ids]
        del views
        os._exit(0 if good and dataset.read_each(ids) == [expected[id] for id in ids] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [view.tobytes() for view in views] == [expected[id] for id in ids] and all(view.is_good for view in views)


def test_killed_children_do_no_harm(session, expected):
    dataset = dayfly.attach(session.id, 2).dataset(TRAIN)
    for _ in range(5):
        child = os.fork()
        if child == 0:
            while True:
                held = dataset.views(range(100))
                dataset.read_each(range(100))
        time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert dataset.read_each(range(len(dataset))) == expected


def test_objects_are_pickled_as_names(attached, train, expected):
    assert pickle.loads(pickle.dumps(attached)) == attached
    other = pickle.loads(pickle.dumps(train))
    assert other.root == train.root and other.read_one(3) == expected[3]
    largest = max(range(len(train)), key=lambda id: len(expected[id]))
    view = train.views([largest])[0]
    pickled = pickle.dumps(view)
    assert len(pickled) < 300 < len(view)
    again = pickle.loads(pickled)
    assert again.tobytes() == expected[largest] and again.id == largest


READ_ALL = """
import hashlib, os, sys, dayfly
data = dayfly.attach().dataset('/dayfly/train')
def digest(parts): return hashlib.sha256(b''.join(parts)).hexdigest()
mine = digest(data.read_each(range(len(data))))
theirs = digest(memoryview(view) for view in data.views(range(len(data))))
assert mine == theirs
"""


@pytest.mark.parametrize("preload", [False, True])
def test_the_module_works_with_and_without_the_preload_library(session, expected, preload):
    import hashlib

    code = READ_ALL + (
        "paths = data.paths()\n"
        "assert not (sys.argv[1:] or %r) or digest(open(path, 'rb').read() for path in paths) == mine\n" % preload
    )
    code += "print(mine)"
    done = run(code, session, preload=preload, node=1)
    assert done.stdout.strip() == hashlib.sha256(b"".join(expected)).hexdigest()


@pytest.mark.parametrize("preload", [False, True])
def test_forks_work_with_and_without_the_preload_library(session, preload):
    code = READ_ALL + (
        "if %r: open('/dayfly/train/readme.txt').read()\n"
        "for _ in range(5):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        good = digest(data.read_each(range(len(data)))) == mine\n"
        "        good = good and (not %r or open('/dayfly/train/readme.txt').read() == 'not in a class\\n')\n"
        "        os._exit(0 if good else 1)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "assert digest(data.read_each(range(len(data)))) == mine\n" % (preload, preload)
    )
    run(code, session, preload=preload)


@pytest.mark.parametrize("preload", [False, True])
def test_programs_that_close_all_descriptors_go_on(session, preload):
    code = READ_ALL + (
        "if %r: open('/dayfly/train/readme.txt').read()\n"
        "os.closerange(3, 1 << 16)\n"
        "assert digest(data.read_each(range(len(data)))) == mine\n"
        "if %r: assert open('/dayfly/train/readme.txt').read() == 'not in a class\\n'\n" % (preload, preload)
    )
    run(code, session, preload=preload)


@pytest.mark.parametrize("preload", [False, True])
@pytest.mark.parametrize("module_first", [False, True])
def test_a_bus_error_of_the_program_stays_its_own(session, preload, module_first):
    """The module and the preload library each have a handler for SIGBUS, whoever comes first. Other faults end the process."""
    use = ["data.views(range(9))", "open('/dayfly/train/readme.txt').read()" if preload else "pass"]
    code = (
        "import ctypes, mmap, os, tempfile, dayfly\n"
        + ("data = dayfly.attach().dataset('/dayfly/train')\n" if module_first or not preload else "")
        + ("open('/dayfly/train/readme.txt').read()\n" if preload else "")
        + "data = dayfly.attach().dataset('/dayfly/train')\n"
        + "\n".join(use)
        + "\nfile = tempfile.TemporaryFile(); file.truncate(8192); m = mmap.mmap(file.fileno(), 8192)\n"
        "file.truncate(0)\nprint(m[5000])\n"
    )
    done = run(code, session, preload=preload, check=False)
    assert done.returncode in (-signal.SIGBUS, 128 + signal.SIGBUS), (done.returncode, done.stderr)


@pytest.mark.parametrize("preload", [False, True])
def test_the_programs_handler_for_bus_errors_is_called(session, preload):
    code = (
        "import faulthandler, mmap, tempfile, dayfly\n"
        "faulthandler.enable()\n"
        + ("open('/dayfly/train/readme.txt').read()\n" if preload else "")
        + "data = dayfly.attach().dataset('/dayfly/train'); data.read_each(range(9))\n"
        "file = tempfile.TemporaryFile(); file.truncate(8192); m = mmap.mmap(file.fileno(), 8192)\n"
        "file.truncate(0)\nprint(m[5000])\n"
    )
    done = run(code, session, preload=preload, check=False)
    assert done.returncode in (-signal.SIGBUS, 128 + signal.SIGBUS)
    assert "Fatal Python error: Bus error" in done.stderr


# Waits.

WAITS = ["45", "47"]
"""The system calls in which a thread waits for the server: recvfrom, recvmsg."""


def server_pids(session):
    folder = Path(os.environ["DAYFLY_RUNTIME_DIR"]) / f"dayfly-{os.getuid()}" / session.id
    return [int((folder / f"node-{node}.lock").read_text()) for node in range(3)]


def stop(pid):
    """Stops a process. Its threads stop one after another."""
    os.kill(pid, signal.SIGSTOP)
    while any(task.joinpath("stat").read_text().rpartition(")")[2].split()[0] != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        time.sleep(0.001)


@pytest.fixture
def fresh(session, tmp_path):
    """A dataset that no test has read, so that most of its samples are not on the first node."""
    for number in range(300):
        (tmp_path / str(number)).write_bytes(bytes([number % 256]) * 5_000)
    session.stage_in(tmp_path, f"/dayfly/{tmp_path.name}")
    return f"/dayfly/{tmp_path.name}"


# With a view, the read needs a new connection, for which it waits first.
@pytest.mark.parametrize("held", ["None", "data.views(far[:1])"])
def test_an_interrupt_ends_a_wait(session, fresh, held):
    code = (
        "import signal, threading, time, os, dayfly\n"
        f"WAITS = {WAITS}\n"
        # A process that a shell has started in the background ignores it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"data = dayfly.attach().dataset('{fresh}')\n"
        "far = [id for id in range(len(data)) if not data.is_here([id])[0] and data.sizes()[id] > 0]\n"
        f"held = {held}\n"
        "print('ready', flush=True)\n"
        "input()\n"
        "def interrupt():\n"
        "    main = os.getpid()\n"
        "    while open(f'/proc/self/task/{main}/syscall').read().split()[0] not in WAITS: time.sleep(0.01)\n"
        "    os.kill(main, signal.SIGINT)\n"
        "begin = time.monotonic()\n"
        "try:\n"
        "    threading.Thread(target=interrupt).start()\n"
        "    data.read_each(far)\n"
        "    print('read')\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', time.monotonic() - begin)\n"
        "input()\n"
        "assert len(data.read_each(far)) == len(far)\n"
        "print('works again')\n"
    )
    environment = {**os.environ, "DAYFLY_SESSION": session.id, "DAYFLY_NODE": "0"}
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    server = server_pids(session)[0]
    try:
        assert child.stdout.readline() == "ready\n"
        stop(server)
        child.stdin.write("\n")
        child.stdin.flush()
        answer = child.stdout.readline().split()
    finally:
        os.kill(server, signal.SIGCONT)
    assert answer[0] == "interrupted", answer
    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.read() == "works again\n"
    assert child.wait(30) == 0


def test_other_threads_run_during_a_wait(session, fresh):
    dataset = dayfly.attach(session.id, 1).dataset(fresh)
    server = server_pids(session)[1]
    far = [id for id in range(len(dataset)) if not dataset.is_here([id])[0] and dataset.sizes()[id] > 0]
    assert far
    reader = threading.Thread(target=dataset.read_each, args=(far,))
    try:
        stop(server)
        reader.start()
        while Path(f"/proc/self/task/{reader.native_id}/syscall").read_text().split()[0] not in WAITS:
            time.sleep(0.01)
        for _ in range(100_000):
            pass
        assert reader.is_alive()
    finally:
        os.kill(server, signal.SIGCONT)
    reader.join(60)
    assert not reader.is_alive()


def test_a_session_that_has_ended_says_so(tmp_path):
    with dayfly.session(local=2, data_dir=tmp_path, capacity="64MiB", memory="32MiB") as running:
        folder = tmp_path / "few"
        folder.mkdir()
        (folder / "a").write_bytes(b"1" * 1000)
        running.stage_in(folder, "/dayfly/few")
        attached = dayfly.attach(running.id)
        dataset = attached.dataset("/dayfly/few")
        view = dataset.views([0])[0]
        assert dataset.read_one(0) == b"1" * 1000
    assert attached.is_gone and dataset.is_gone and not view.is_good
    with pytest.raises(OSError) as raised:
        dataset.read_one(0)
    assert raised.value.filename == "/dayfly/few/a" and "ended" in raised.value.strerror
    for call in (lambda: attached.read("/dayfly/few/a"), lambda: dataset.read_each([0]), lambda: dataset.views([0])):
        with pytest.raises(OSError):
            call()
    with pytest.raises(dayfly.Error):
        dataset.order([0])
    # A sample of this node is still mapped; the lease of another node's sample has ended.
    try:
        view.tobytes()
    except dayfly.Error as error:
        assert "read the sample again" in str(error)


def test_the_stubs_describe_the_module():
    names = {name for name in dir(_dayfly) if not name.startswith("_")} | {"__version__"}
    stub = Path(dayfly.__file__).with_name("_dayfly.pyi").read_text()
    for name in names:
        assert f"class {name}" in stub or f"def {name}(" in stub or f"{name}: " in stub, name
