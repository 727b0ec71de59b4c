"""Runs fio with each of its engines. fio verifies what it reads.

fio first writes a file with checksums outside the namespace. This file is staged in; each engine then reads and verifies it.
"""

import shutil
import subprocess

from session import ATTACHED, INSIDE

ENGINES = ["sync", "psync", "vsync", "pvsync", "pvsync2", "mmap", "splice", "posixaio", "libaio", "io_uring"]
JOB = ["--name=file", "--size=12m", "--bs=16k", "--verify=crc32c", "--verify_fatal=1", "--minimal", "--iodepth=8"]
SECONDS_MAX = 120


def missing():
    return None if shutil.which("fio") else "fio is missing (package fio)"


def run(session, comparison):
    tree = session.work / "made"
    tree.mkdir()
    subprocess.run(["fio", *JOB, "--filename=data", "--rw=write", "--ioengine=psync", "--do_verify=0"], cwd=tree, check=True, capture_output=True)
    for state in tree.glob("*.state"):
        state.unlink()
    session.start(tree)

    def case(group, way):
        engine, order = group.split("-")
        # The other ways read the plain copy of the file.
        file = session.tree(way) / "data"
        reading = ["fio", *JOB, f"--filename={file}", f"--rw={order}", f"--ioengine={engine}", "--readonly", "--verify_state_save=0"]
        status, output = session.run(way, reading, SECONDS_MAX, folder=session.work)
        return {group: ("pass" if status == 0 else f"status {status}", output)}

    groups = [f"{engine}-{order}" for engine in ENGINES for order in ["read", "randread"]]
    comparison.run_all(groups, [ATTACHED, INSIDE], case)
