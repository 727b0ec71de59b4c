"""Programs that know nothing of Dayfly: each prints the same for a folder and, under `dayfly exec`, for the namespace.

docs/PYTHON.md has a row for each of them.
"""

import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow
import pytest
import torch
import webdataset
from dayfly.sessions import _program
from PIL import Image
from pyarrow import feather, parquet
from safetensors.torch import save_file

PAGE = Path(__file__).parents[2] / "docs" / "PYTHON.md"

IMAGE_FOLDER = """
import sys, torch, torchvision
from torchvision.transforms.functional import pil_to_tensor
if __name__ == "__main__":
    photos = torchvision.datasets.ImageFolder(sys.argv[1] + "/photos", transform=pil_to_tensor)
    # A worker that does not come from `fork` imports PyTorch, which takes seconds.
    workers = 2 if sys.argv[2] == "fork" else 1
    loader = torch.utils.data.DataLoader(photos, batch_size=4, num_workers=workers, multiprocessing_context=sys.argv[2])
    print(photos.classes, [(int(pixels.sum()), labels.tolist()) for pixels, labels in loader])
"""

PROGRAMS = {
    "`ImageFolder` with `fork`": (IMAGE_FOLDER, "fork"),
    "`ImageFolder` with `spawn`": (IMAGE_FOLDER, "spawn"),
    "`ImageFolder` with `forkserver`": (IMAGE_FOLDER, "forkserver"),
    "`torchrun`, DDP": """
import sys, torch, torch.distributed as dist, torchvision
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.transforms.functional import pil_to_tensor
dist.init_process_group("gloo")
photos = torchvision.datasets.ImageFolder(sys.argv[1] + "/photos", transform=lambda image: pil_to_tensor(image).float().mean().view(1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 3))
torch.nn.init.ones_(model.module.weight), torch.nn.init.zeros_(model.module.bias)
optimizer = torch.optim.SGD(model.parameters(), 0.001)
sampler = DistributedSampler(photos)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for pixels, labels in DataLoader(photos, batch_size=3, sampler=sampler, num_workers=1):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(pixels), labels).backward()
        optimizer.step()
if dist.get_rank() == 0:
    print([round(float(value), 4) for value in model.module.weight.flatten()])
dist.destroy_process_group()
""",
    "WebDataset": """
import sys, torch, webdataset
shards = webdataset.WebDataset(sys.argv[1] + "/shards/{0..1}.tar", shardshuffle=False).decode("rgb8").to_tuple("png", "cls")
loader = torch.utils.data.DataLoader(shards, batch_size=None, num_workers=2)
print(sorted((int(image.sum()), label) for image, label in loader))
""",
    "PyArrow: Parquet, Feather, with and without `memory_map`": """
import sys, pyarrow
from pyarrow import dataset, feather, parquet
for mapped in (False, True):
    print(parquet.read_table(sys.argv[1] + "/tables/a.parquet", memory_map=mapped)["text"][7])
    print(feather.read_table(sys.argv[1] + "/tables/a.feather", memory_map=mapped)["number"][999])
print(dataset.dataset(sys.argv[1] + "/tables", exclude_invalid_files=True).count_rows())
""",
    "Hugging Face `datasets`: Arrow and Parquet files": """
import sys, tempfile, datasets
print(datasets.Dataset.from_file(sys.argv[1] + "/tables/a.arrow")[10:12])
with tempfile.TemporaryDirectory() as cache:
    print(datasets.load_dataset("parquet", data_files=sys.argv[1] + "/tables/a.parquet", split="train", streaming=True, cache_dir=cache).take(1))
    print(datasets.load_dataset("parquet", data_files=sys.argv[1] + "/tables/a.parquet", split="train", cache_dir=cache)[5])
""",
    "pandas": """
import sys, pandas
print(pandas.read_parquet(sys.argv[1] + "/tables/a.parquet").describe(), pandas.read_csv(sys.argv[1] + "/tables/a.csv").tail())
""",
    "h5py": """
import sys, h5py
with h5py.File(sys.argv[1] + "/arrays/a.h5") as file:
    print(file["x"][10:20].sum(), list(file), file["packed"][::100].sum())
""",
    "NumPy: `np.load(mmap_mode=\"r\")`, `np.memmap`, `.npz`": """
import sys, numpy
print(numpy.load(sys.argv[1] + "/arrays/a.npy", mmap_mode="r")[::1000].sum())
print(numpy.memmap(sys.argv[1] + "/arrays/a.npy", "uint8", "r")[-8:].tolist(), numpy.load(sys.argv[1] + "/arrays/a.npz")["x"].sum())
""",
    "`torch.load`, also with `mmap=True`": """
import sys, torch
for mapped in (False, True):
    print({name: float(value.sum()) for name, value in torch.load(sys.argv[1] + "/arrays/a.pt", mmap=mapped).items()})
""",
    "safetensors": """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1] + "/arrays/a.safetensors", "pt") as file:
    print({name: float(file.get_tensor(name).sum()) for name in file.keys()}, file.get_slice("x")[5:7].tolist())
""",
    "SQLite, opened with `mode=ro`": """
import sqlite3, sys
base = sqlite3.connect(f"file:{sys.argv[1]}/tables/a.db?mode=ro", uri=True)
print(base.execute("select count(*), sum(number) from t where number % 7 = 0").fetchall())
""",
    "`os.walk`, `glob`, `pathlib`, `zipfile`, `tarfile`, `shutil`, subprocesses": """
import glob, os, pathlib, shutil, subprocess, sys, tarfile, tempfile, zipfile
root = sys.argv[1]
print(sorted(os.path.relpath(os.path.join(at, name), root) for at, _, names in os.walk(root) for name in names))
print(len(glob.glob(root + "/**/*.png", recursive=True)), sorted(path.name for path in pathlib.Path(root, "tables").iterdir()))
print(zipfile.ZipFile(root + "/arrays/a.npz").namelist(), tarfile.open(root + "/shards/0.tar").getnames())
with tempfile.TemporaryDirectory() as copy:
    shutil.copytree(root + "/photos", copy + "/photos")
    print(subprocess.check_output(["diff", "-r", copy + "/photos", root + "/photos"]))
print(subprocess.check_output("sha256sum < arrays/a.npy", shell=True, cwd=root))
""",
}


@pytest.fixture(scope="module")
def folder(session, tmp_path_factory):
    """A folder with files that these libraries have written, staged in as /dayfly/unchanged."""
    root = tmp_path_factory.mktemp("unchanged")
    numbers = np.random.default_rng(3)
    for kind in ("cat", "dog"):
        (root / "photos" / kind).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(numbers.integers(0, 256, (20, 30, 3), np.uint8)).save(root / f"photos/{kind}/{number}.png")
    (root / "shards").mkdir()
    for shard in range(2):
        with webdataset.TarWriter(str(root / f"shards/{shard}.tar")) as writer:
            for number, path in enumerate(sorted((root / "photos").glob("*/*.png"))):
                writer.write({"__key__": f"{shard}{number:03}", "png": path.read_bytes(), "cls": b"%d" % number})
    (root / "tables").mkdir()
    table = pyarrow.table({"number": range(1000), "text": [f"row {number}" for number in range(1000)]})
    parquet.write_table(table, root / "tables/a.parquet")
    feather.write_feather(table, str(root / "tables/a.feather"), compression="uncompressed")
    with pyarrow.OSFile(str(root / "tables/a.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    table.to_pandas().to_csv(root / "tables/a.csv", index=False)
    with sqlite3.connect(root / "tables/a.db") as base:
        base.execute("create table t (number integer)")
        base.executemany("insert into t values (?)", ((number,) for number in range(10_000)))
    base.close()
    (root / "arrays").mkdir()
    array = numbers.random((1000, 300))
    np.save(root / "arrays/a.npy", array)
    np.savez(root / "arrays/a.npz", x=array)
    torch.save({"x": torch.from_numpy(array)}, root / "arrays/a.pt")
    save_file({"x": torch.from_numpy(array)}, str(root / "arrays/a.safetensors"))
    with h5py.File(root / "arrays/a.h5", "w") as file:
        file["x"] = array
        file.create_dataset("packed", data=array, compression="gzip", chunks=(10, 300))
    session.stage_in(root, "/dayfly/unchanged")
    return str(root)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_prints_the_same_for_the_namespace(session, folder, tmp_path, name):
    code, *arguments = (PROGRAMS[name],) if isinstance(PROGRAMS[name], str) else PROGRAMS[name]
    program = tmp_path / "program.py"
    program.write_text(code)
    start = [sys.executable]
    if name.startswith("`torchrun`"):
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    expected = subprocess.check_output([*start, program, folder, *arguments], text=True)
    line = [_program(), "exec", "--", *start, program, "/dayfly/unchanged", *arguments]
    assert subprocess.check_output(line, text=True).replace("/dayfly/unchanged", folder) == expected != ""


def test_the_page_names_these_programs():
    page = PAGE.read_text()
    rows = re.findall(r"^\| (.*?) \| works \|$", page, re.MULTILINE)
    assert rows == list(PROGRAMS)
