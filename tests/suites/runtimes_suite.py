"""Other preloaded libraries, before Dayfly's library and after it, and other runtimes: Java, and Go with cgo.

A case passes if its programs succeed. Its result contains a checksum of what the programs print, because that must not change.
"""

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from session import ATTACHED, HERE, INSIDE, PLAIN

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")

# Libraries that programs preload, and their packages.
PRELOADED = {
    "jemalloc": (LIBRARIES / "libjemalloc.so.2", "libjemalloc2"),
    "tcmalloc": (LIBRARIES / "libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"),
    "faketime": (LIBRARIES / "faketime/libfaketime.so.1", "libfaketime"),
    "eatmydata": (LIBRARIES / "libeatmydata.so", "libeatmydata1"),
    "stdbuf": (Path("/usr/libexec/coreutils/libstdbuf.so"), "coreutils"),
}

PROGRAMS = """
set -e; cd "$0"
find . -type f | sort | xargs sha256sum; ls -lR --time-style=long-iso | grep -v ^total | sed -E 's/^(d[^ ]* +[0-9]+ [^ ]+ [^ ]+) +[0-9]+/\\1/'
tar cf - . | tar tf - | sort; grep -rc words . | sort; head -c 5 < folder/file; cat folder/* | wc -c
python3 -c 'import os, mmap; f = open("folder/file", "rb"); print(mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)[:], os.fstat(f.fileno()).st_size)'
perl -e 'open F, "folder/file"; print <F>; print -s "folder/file"'
"""

SECONDS_MAX = 120


def missing():
    return None if shutil.which("gcc") else "gcc is missing"


def run(session, comparison):
    tree = session.work / "made"
    (tree / "folder/empty").mkdir(parents=True)
    (tree / "folder/file").write_text("some words\n" * 1000)
    (tree / "big").write_bytes(bytes(range(256)) * 4000)
    (tree / "link").symlink_to("folder/file")
    session.start(tree)
    cases = {}
    for name, (library, package) in PRELOADED.items():
        if not library.exists():
            print(f"did not run: {name} (package {package})", flush=True)
            continue
        for order in ["first", "last"]:
            cases[f"{name}-{order}"] = ["sh", "-c", PRELOAD[order], str(library), "sh", "-c", PROGRAMS]
    cases |= fakeroot() | java(session) | go(session)

    def case(name, way):
        with tempfile.TemporaryDirectory(prefix="dfr", dir=session.work) as work:
            status, output = session.run(way, [*cases[name], session.tree(way)], SECONDS_MAX, {"TMPDIR": work, "FAKETIME": "-1d"}, work)
            output = output.replace(str(session.prefix), str(session.real))
            print_of = hashlib.sha256(output.encode()).hexdigest()[:8]
            return {name: (f"pass {print_of}" if status == 0 else f"status {status}", output)}

    comparison.run_all(list(cases), [ATTACHED, INSIDE], case)


PRELOAD = {
    "first": 'LD_PRELOAD="$0${LD_PRELOAD:+:$LD_PRELOAD}" exec "$@"',
    "last": 'LD_PRELOAD="${LD_PRELOAD:+$LD_PRELOAD:}$0" exec "$@"',
}


def fakeroot():
    if not shutil.which("fakeroot"):
        print("did not run: fakeroot (package fakeroot)", flush=True)
        return {}
    return {"fakeroot": ["fakeroot", "--", "sh", "-c", PROGRAMS]}


def java(session):
    if not shutil.which("javac"):
        print("did not run: java (package default-jdk-headless)", flush=True)
        return {}
    session.run(PLAIN, ["javac", "-d", session.work, HERE / "programs/Nio.java"], SECONDS_MAX)
    return {"java": ["java", "-cp", session.work, "Nio"]}


def go(session):
    if not shutil.which("go"):
        print("did not run: go with cgo (package golang-go)", flush=True)
        return {}
    program = session.work / "cgo"
    subprocess.run(["go", "build", "-o", program, HERE / "programs/cgo.go"], env=dict(session.environment(), GO111MODULE="off", CGO_ENABLED="1"), check=True)
    return {"go": ["sh", "-c", '"$0" "$1/folder/file"', program]}
