"""Runs the code blocks of README.md and docs/PYTHON.md, one after another."""

import re
import subprocess
import sys
from pathlib import Path

import dayfly

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "PYTHON.md"


def python_blocks(page):
    """The blocks of Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_code_blocks_run(session, tmp_path):
    own = tmp_path / "own"
    for kind in ("ant", "bee"):
        (own / kind).mkdir(parents=True)
        for number in range(200):
            (own / kind / f"{number}.jpg").write_bytes(bytes([number]) * (1000 + number))
    session.stage_in(own, "/dayfly/docs")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("content")
    blocks = python_blocks(PAGE)
    assert len(blocks) >= 9
    one_line, three_lines = python_blocks(ROOT / "README.md")
    blocks += [three_lines, "loader = torch.utils.data.DataLoader(samples)", one_line, "list(loader)"]
    start = "import multiprocessing\nmultiprocessing.set_start_method('fork')\n"
    code = start + "\n".join(blocks).replace("/dayfly/train", "/dayfly/docs").replace("/tmp/dayfly-docs-", f"{tmp_path}/")
    program = tmp_path / "page.py"
    program.write_text(code)
    done = subprocess.run([sys.executable, program], text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_page_names_every_public_name():
    import dayfly.torch

    page = PAGE.read_text()
    missing = [name for name in dayfly.torch.__all__ if name.lower() not in page.lower()]
    assert not missing, "docs/PYTHON.md does not name these"


def test_the_program_in_formats_computes_the_order_of_an_epoch(session):
    found = {}
    exec(python_blocks(ROOT / "docs" / "FORMATS.md")[0], found)
    data = dayfly.attach().dataset("/dayfly/train")
    for seed, epoch in [(0, 0), (1, 7), (2**64 - 1, 2**64 - 1)]:
        assert list(found["epoch_ids"](len(data), seed, epoch)) == data.epoch_ids(seed, epoch).tolist()
    for count in (0, 1, 2, 3, 4, 5, 1000):
        assert sorted(found["epoch_ids"](count, 5, 6)) == list(range(count))
