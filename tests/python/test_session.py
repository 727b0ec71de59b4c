"""Sessions that Python starts, finds and ends, and the functions over the namespace."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import dayfly
import pytest
from dayfly.sessions import _program


def wait_until(is_so):
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_package_imports_without_torch_and_numpy():
    code = (
        "import sys\nfor name in ('torch', 'numpy', 'fsspec', 'tqdm'): sys.modules[name] = None\n"
        "import dayfly; print(dayfly.attach, dayfly.session, dayfly.Error)"
    )
    assert "attach" in subprocess.check_output([sys.executable, "-c", code], text=True)


def test_functions_read_what_was_staged_in(session, under):
    files = under("/dayfly/train")
    path = "/dayfly/train/ant/0000.bin"
    assert dayfly.read(path) == files[path]
    assert dayfly.read_many(list(files)) == list(files.values())
    assert dayfly.stat(path).st_size == len(files[path])
    assert [entry.name for entry in dayfly.list("/dayfly/train/dayfly")] == ["a", "b"]
    with pytest.raises(FileNotFoundError) as missing:
        dayfly.read("/dayfly/train/none")
    assert missing.value.filename == "/dayfly/train/none"


def test_walk_visits_every_file_and_skips_what_the_program_removes(session, under):
    walked = [os.path.join(here, name) for here, _, names in dayfly.walk("/dayfly/train") for name in names]
    assert sorted(walked) == sorted(under("/dayfly/train"))
    visited = []
    for here, directories, _ in dayfly.walk("/dayfly/train"):
        visited.append(here)
        directories[:] = [name for name in directories if name == "bee"]
    assert visited == ["/dayfly/train", "/dayfly/train/bee"]


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        ("/dayfly/train/*/000?.bin", lambda path: path.count("/") == 4 and path.split("/")[-1].startswith("000")),
        ("/dayfly/train/**/*.bin", lambda path: path.endswith(".bin")),
        ("/dayfly/train/[ab]*/*1.bin", lambda path: path.split("/")[3] in ("ant", "bee") and path.endswith("1.bin")),
        ("/dayfly/train/ant/0000.bin", lambda path: path == "/dayfly/train/ant/0000.bin"),
        ("/dayfly/train/none/*", lambda path: False),
        ("/dayfly/train/readme.txt/*", lambda path: False),
        ("/dayfly/*/readme.txt", lambda path: path.endswith("readme.txt")),
    ],
)
def test_glob(session, under, pattern, matches):
    assert dayfly.glob(pattern) == sorted(filter(matches, under("/dayfly/train")))


def test_a_relative_pattern_is_refused(session):
    with pytest.raises(ValueError, match="pattern must be an absolute path"):
        dayfly.glob("train/*")


def test_prefetch_takes_paths_or_numbers(session, under):
    with dayfly.prefetch(["/dayfly/train/ant/0000.bin"]) as order:
        assert len(order) == 1
    with dayfly.prefetch(range(5), dataset="/dayfly/train") as order:
        assert len(order) == 5
    with pytest.raises(TypeError, match="samples must be paths, not int; to pass numbers of samples, also pass dataset="):
        dayfly.prefetch([1, 2])
    with pytest.raises(ValueError, match="samples must name at least one file"):
        dayfly.prefetch([])


def test_a_session_that_runs_is_found_and_goes_on(session):
    with dayfly.session() as found:
        assert found.id == session.id and not found.is_own
        assert found.attach(1).node == 1
    assert os.environ["DAYFLY_SESSION"] == session.id
    assert dayfly.attach().id == session.id and not dayfly.attach().is_gone


def test_an_own_session_goes_on_without_its_object(session, tmp_path):
    (tmp_path / "a.txt").write_text("hello")

    def start():
        own = dayfly.session(local=1, data_dir=tmp_path)
        own.stage_in(tmp_path / "a.txt", "/dayfly/own")
        return weakref.ref(own)

    own = start()
    gc.collect()
    assert dayfly.read("/dayfly/own/a.txt") == b"hello"
    own().end()
    gc.collect()
    assert own() is None and os.environ["DAYFLY_SESSION"] == session.id


def test_an_own_session_ends_with_its_process_even_if_a_signal_kills_it(session, tmp_path):
    script = (
        "import os, signal, sys, dayfly\n"
        "own = dayfly.session(local=1, data_dir=sys.argv[1])\n"
        "print(own.id, flush=True)\n"
        "os.kill(os.getpid(), getattr(signal, sys.argv[2]))\n"
    )
    sessions = Path(os.environ["DAYFLY_RUNTIME_DIR"]) / f"dayfly-{os.getuid()}"
    for kill in "SIGKILL", "SIGTERM":
        line = [sys.executable, "-c", script, tmp_path, kill]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=False)
        assert done.returncode == -getattr(signal, kill)
        folder = sessions / done.stdout.strip()
        assert folder.name
        wait_until(lambda: not folder.exists())


def test_a_process_attaches_to_the_server_that_has_taken_another_ones_place(session, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with dayfly.session(local=2, data_dir=tmp_path) as own:
        own.stage_in(tmp_path / "a.txt", "/dayfly/own")
        old = own.attach(0)
        lock = Path(os.environ["DAYFLY_RUNTIME_DIR"]) / f"dayfly-{os.getuid()}" / own.id / "node-0.lock"
        server = int(lock.read_text())
        os.kill(server, signal.SIGTERM)

        def is_replaced():
            rejoined = subprocess.run([_program(), "rejoin", "0"], check=False)
            return rejoined.returncode == 0 and int(lock.read_text()) != server

        wait_until(is_replaced)
        for attached in old, own.attach(0):
            assert not attached.is_gone and attached.read("/dayfly/own/a.txt") == b"hello"


def test_an_own_session_reports_progress_and_ends_with_the_block(session, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("hello")
    events = []
    with dayfly.session(local=1, data_dir=tmp_path) as own:
        assert own.id != session.id and os.environ["DAYFLY_SESSION"] == own.id
        summary = own.stage_in(tmp_path / "in", "/dayfly/own", progress=events.append)
        assert (summary["samples"], summary["bytes"]) == (1, 5)
        assert own.attach().read("/dayfly/own/a.txt") == b"hello"
        # Forked children, and processes that exit without an error, leave the session alone.
        if (child := os.fork()) == 0:
            own.end()
            os._exit(0)
        os.waitpid(child, 0)
        attached = own.attach()
        assert attached.read("/dayfly/own/a.txt") == b"hello"
    assert {event["event"] for event in events} >= {"planned", "staged-in"}
    assert os.environ["DAYFLY_SESSION"] == session.id
    assert attached.is_gone
    own.end()


@pytest.mark.parametrize("has_tqdm", [True, False])
def test_progress_is_shown(session, tmp_path, has_tqdm):
    (tmp_path / "a.txt").write_text("hello")
    code = (
        f"import sys\nif not {has_tqdm}: sys.modules['tqdm'] = None\nimport dayfly\n"
        f"dayfly.session().stage_in('{tmp_path}/*.txt', '/dayfly/shown{has_tqdm}', progress=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert f"/dayfly/shown{has_tqdm}: " in done.stderr and "1 samples" in done.stderr


def test_failures_carry_the_message_of_the_program(session, tmp_path):
    with pytest.raises(dayfly.Error, match="cannot stage in to '/dayfly/none'.*absent"):
        session.stage_in(tmp_path / "absent.tar", "/dayfly/none")
    with pytest.raises(ValueError, match="--copies"):
        session.stage_in(tmp_path, "/dayfly/none", copies="many")
    with pytest.raises(ValueError, match="unexpected argument '--no-such-option'"):
        session.stage_in(tmp_path, "/dayfly/none", no_such_option=True)
    with pytest.raises(TypeError, match="copies must be a text"):
        session.stage_in(tmp_path, "/dayfly/none", copies={})
    with pytest.raises(ValueError, match="sources must name at least one"):
        session.stage_in([], "/dayfly/none")
    with pytest.raises(TypeError, match="progress must be True, False or a function"):
        session.stage_in(tmp_path, "/dayfly/none", progress="yes")
    with pytest.raises(ValueError, match="start=False cannot be combined"):
        dayfly.session(local=1, start=False)


def test_without_a_session_the_error_says_so(tmp_path):
    code = "import dayfly\ntry: dayfly.session()\nexcept dayfly.Error as error: print(error)"
    environment = {**os.environ, "DAYFLY_RUNTIME_DIR": str(tmp_path)}
    environment.pop("DAYFLY_SESSION", None)
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert "no session" in printed
