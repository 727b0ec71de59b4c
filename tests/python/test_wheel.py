"""The wheel holds what it should, and its programs and libraries run with an old C library."""

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import dayfly
import pytest

WHEEL = os.environ.get("DAYFLY_WHEEL")
pytestmark = pytest.mark.skipif(WHEEL is None, reason="DAYFLY_WHEEL names no wheel")

EXPECTED = ["scripts/dayfly", "data/lib/dayfly/libdayfly_preload.so", "data/include/dayfly.h"]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder


def test_the_wheel_has_program_library_header_and_package(unpacked):
    data = next(unpacked.glob("dayfly-*.data"))
    for name in EXPECTED:
        assert (data / name).is_file(), name
    package = unpacked / "dayfly"
    for name in ("__init__.py", "py.typed", "_dayfly.pyi", "_dayfly.abi3.so", "torch/__init__.py"):
        assert (package / name).is_file(), name
    entries = next(unpacked.glob("dayfly-*.dist-info/entry_points.txt")).read_text()
    assert "dayfly.fsspec:DayflyFileSystem" in entries


def test_no_elf_file_needs_a_newer_c_library_than_the_tag_says(unpacked):
    tag = re.search(r"manylinux_(\d+)_(\d+)_x86_64\.whl$", WHEEL)
    assert tag, WHEEL
    newest = (int(tag[1]), int(tag[2]))
    assert newest <= (2, 28)
    elf_files = [file for file in unpacked.rglob("*") if file.is_file() and file.read_bytes()[:4] == b"\x7fELF"]
    assert len(elf_files) == 3, elf_files
    for file in elf_files:
        symbols = subprocess.run(["readelf", "-VW", file], capture_output=True, text=True, check=True).stdout
        versions = {tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([\d.]+)", symbols)}
        assert versions, file
        assert max(versions) <= newest, f"{file.name} needs glibc {max(versions)}"
        needed = subprocess.run(["readelf", "-dW", file], capture_output=True, text=True, check=True).stdout
        libraries = set(re.findall(r"NEEDED.*\[(.*?)\]", needed))
        system = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
        assert libraries <= system, f"{file.name} needs {libraries - system}"


def test_the_installed_program_finds_its_preload_library(session):
    program = Path(sysconfig.get_path("scripts")) / "dayfly"
    assert program.is_file()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    assert version.split()[-1] == dayfly.__version__
    code = "import os; print(sorted(os.listdir('/dayfly')))"
    environment = {**os.environ, "DAYFLY_SESSION": session.id}
    listed = subprocess.run(
        [program, "exec", "--", sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert "train" in listed.stdout


def test_the_tarball_is_all_that_a_machine_without_python_needs(unpacked, tmp_path):
    wheels = Path(WHEEL).parent
    if wheels.name != "wheels":
        pytest.skip("build-wheel made no tarball beside this wheel")
    [tarball] = (wheels.parent / "tarball").glob("dayfly-*-x86_64-unknown-linux-gnu.tar.gz")
    subprocess.run(["tar", "-C", tmp_path, "-xf", tarball], check=True)
    [root] = tmp_path.iterdir()
    assert root.name == f"dayfly-{dayfly.__version__}-x86_64-unknown-linux-gnu"
    data = next(unpacked.glob("dayfly-*.data"))
    for name, path in zip(["bin/dayfly", "lib/dayfly/libdayfly_preload.so", "include/dayfly.h"], EXPECTED):
        assert (root / name).read_bytes() == (data / path).read_bytes()
    assert ".TH dayfly 1" in (root / "share/man/man1/dayfly.1").read_text()
    assert (root / "share/man/man1/dayfly-run.1").exists()
    for name in ("bash-completion/completions/dayfly", "zsh/site-functions/_dayfly", "fish/vendor_completions.d/dayfly.fish"):
        assert "stage-in" in (root / "share" / name).read_text(), name
    (tmp_path / "train").mkdir()
    (tmp_path / "train/1").write_text("content")
    program = [root / "bin/dayfly", "run", "--local", "1", "--stage-in", f"{tmp_path}/train:/dayfly/train"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    ran = subprocess.run(
        [*program, "--", "cat", "/dayfly/train/1"], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert ran.stdout == "content"
