"""A session of three servers with a dataset, which all tests of the package share.

The program `dayfly` is the one that DAYFLY_PROGRAM names, or the one beside the package, or the one in
PATH. Nothing of Dayfly is mocked.
"""

import os
import random
import tarfile
import tempfile
from pathlib import Path

import dayfly
import pytest

NODES = 3
CLASSES = ["ant", "bee", "cicada", "dayfly"]


@pytest.fixture(scope="session")
def runtime_dir():
    """A short folder for sessions, so that no other session on this machine is found."""
    # Paths of sockets are at most 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="df", dir="/tmp") as folder:
        before = dict(os.environ)
        os.environ["DAYFLY_RUNTIME_DIR"] = folder
        for name in ("DAYFLY_SESSION", "DAYFLY_NODE", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        yield Path(folder)
        os.environ.clear()
        os.environ.update(before)


def write_tree(folder: Path) -> dict[str, bytes]:
    """Writes 600 files of four classes, of which the last are in two subdirectories, and returns their content by path."""
    rng = random.Random(7)
    content = {}
    for number in range(600):
        kind = CLASSES[number % 4]
        below = f"{kind}/{'ab'[number % 8 // 4]}" if kind == "dayfly" else kind
        content[f"train/{below}/{number:04}.bin"] = rng.randbytes(rng.choice([0, 10, 3_000, 30_000]) + number)
    for number in range(50):
        content[f"pairs/x/{number:03}.jpg"] = rng.randbytes(5_000)
        content[f"pairs/x/{number:03}.json"] = b'{"number": %d}' % number
    content["pairs/x/big.bin"] = rng.randbytes(9_000_000)
    content["train/readme.txt"] = b"not in a class\n"
    for path, data in content.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return content


@pytest.fixture(scope="session")
def content(tmp_path_factory):
    """The content of each staged file by its path below /dayfly."""
    folder = tmp_path_factory.mktemp("sources")
    found = write_tree(folder)
    with tarfile.open(folder / "train.tar", "w") as archive:
        archive.add(folder / "train", ".")
    return found | {"": str(folder).encode()}


@pytest.fixture(scope="session")
def session(runtime_dir, content, tmp_path_factory):
    """A session with the datasets /dayfly/train and /dayfly/pairs."""
    sources = Path(content.pop("").decode())
    data = tmp_path_factory.mktemp("data")
    with dayfly.session(local=NODES, data_dir=data, capacity="256MiB", memory="64MiB") as running:
        running.stage_in(sources / "train.tar", "/dayfly/train")
        running.stage_in(sources / "pairs", "/dayfly/pairs", group="stem")
        yield running


@pytest.fixture
def under(content):
    """A function that returns the files below a directory, by full path."""
    return lambda top: {f"/dayfly/{path}": data for path, data in content.items() if f"/dayfly/{path}".startswith(top + "/")}
