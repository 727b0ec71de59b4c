"""Runs Node's own tests of files and child processes.

With the way `inside`, Node loads the tests, their modules and their fixtures from the namespace. The tests write elsewhere.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from session import ATTACHED, IDLE, INSIDE

SECONDS_MAX = 120




def root():
    return Path(os.environ.get("DAYFLY_SUITES", "")) / "node"


def missing():
    if not os.environ.get("DAYFLY_SUITES"):
        return "DAYFLY_SUITES is not set"
    if not shutil.which("node"):
        return "node is missing (package nodejs)"
    if not (root() / "test/parallel/test-fs-access.js").exists():
        return f"{root()}/test is missing (the source of package nodejs)"
    return None


def run(session, comparison):
    tree = session.work / "made"
    (tree / "test/parallel").mkdir(parents=True)
    for folder in ["common", "fixtures"]:
        shutil.copytree(root() / "test" / folder, tree / "test" / folder, symlinks=True)
    names = sorted(
        test.name for kind in ["fs", "child-process"] for test in (root() / "test/parallel").glob(f"test-{kind}-*.*js")
    )  # fmt: skip
    for name in names:
        shutil.copy2(root() / "test/parallel" / name, tree / "test/parallel")
    session.start(tree)
    shutil.rmtree(tree)

    def case(name, way):
        with tempfile.TemporaryDirectory(prefix="dfn", dir=session.work) as work:
            file = session.tree(way) / "test/parallel" / name
            flags = re.search(r"^// Flags: (.*)$", (session.real / "test/parallel" / name).read_text(errors="replace"), re.M)
            arguments = ["node", *(flags[1].split() if flags else []), file]
            status, output = session.run(way, arguments, SECONDS_MAX, {"NODE_TEST_DIR": work, "TMPDIR": work}, work)
            return {name: ("pass" if status == 0 else f"status {status}", output)}

    comparison.run_all(names, [IDLE, ATTACHED, INSIDE], case)
