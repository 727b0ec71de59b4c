"""Reads a folder in the ways that Python programs do, and prints the results, which must not depend on whether the folder is a
plain directory or a session's namespace.

Usage: programs.py FUNCTION FOLDER
"""

import hashlib
import mmap
import multiprocessing
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import zipfile


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def files(root):
    return sorted(str(path) for path in pathlib.Path(root).rglob("*") if path.is_file())


def walk(root):
    for folder, folders, names in os.walk(root):
        folders.sort()
        print(os.path.relpath(folder, root), folders, sorted(names))
    for folder, folders, names, descriptor in os.fwalk(root):
        folders.sort()
        sizes = [os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_size for name in sorted(names)]
        print(os.path.relpath(folder, root), sizes)
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            print(entry.name, entry.is_dir(), entry.is_symlink(), entry.inode() == entry.stat(follow_symlinks=False).st_ino)


def paths(root):
    root = pathlib.Path(root)
    for path in sorted(root.rglob("*")):
        stat = path.lstat()
        print(path.relative_to(root), oct(stat.st_mode), stat.st_mtime_ns, stat.st_nlink, path.exists())
    print(sorted(path.name for path in root.glob("data/*.txt")))
    print((root / "data" / "numbers.txt").read_text()[:20])
    print((root / "link").resolve().relative_to(root.resolve()))


def copytree(root):
    shutil.rmtree("copied", ignore_errors=True)
    shutil.copytree(root, "copied", symlinks=True)
    print([(os.path.relpath(path, "copied"), digest(path)) for path in files("copied")])
    shutil.rmtree("copied")


def archives(root):
    with zipfile.ZipFile(f"{root}/data/archive.zip") as archive:
        print(archive.namelist(), archive.testzip(), hashlib.sha256(archive.read("numbers.txt")).hexdigest())


def mapped(root):
    with open(f"{root}/data/big.bin", "rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            print(len(view), hashlib.sha256(view).hexdigest(), view.find(b"\0\0"))
        with mmap.mmap(file.fileno(), 5000, access=mmap.ACCESS_COPY, offset=8192) as view:
            view[0] ^= 255
            print(hashlib.sha256(view).hexdigest())


def arrays(root):
    import numpy

    array = numpy.load(f"{root}/data/array.npy", mmap_mode="r")
    print(array.shape, array.dtype, int(array.sum()), type(array).__name__)
    print(int(numpy.load(f"{root}/data/array.npy").sum()))
    print(numpy.fromfile(f"{root}/data/big.bin", dtype="u4", count=100, offset=64).sum())
    print(numpy.memmap(f"{root}/data/big.bin", dtype="u1", mode="r")[-5:])
    with open(f"{root}/data/big.bin", "rb") as file:
        file.seek(100)
        print(numpy.fromfile(file, dtype="u1", count=10), file.tell())


def images(root):
    from PIL import Image

    with Image.open(f"{root}/data/image.png") as image:
        print(image.size, image.mode, hashlib.sha256(image.convert("RGB").tobytes()).hexdigest())


def children(root):
    numbers = f"{root}/data/numbers.txt"
    with open(numbers, "rb") as file:
        print(subprocess.run(["cksum"], stdin=file, capture_output=True).stdout)
    with open(numbers, "rb") as file:
        os.set_inheritable(file.fileno(), True)
        command = ["sh", "-c", f"cksum <&{file.fileno()}"]
        print(subprocess.run(command, close_fds=False, capture_output=True).stdout)
        print(subprocess.run(command, pass_fds=[file.fileno()], capture_output=True).stdout)
    print(subprocess.run(["ls"], cwd=f"{root}/data", capture_output=True).stdout)
    print(subprocess.run("pwd; cat numbers.txt | cksum", shell=True, cwd=f"{root}/data", capture_output=True).stdout)
    print(os.popen(f"wc -c < {numbers}").read())
    os.chdir(f"{root}/data")
    print(os.system("wc -l numbers.txt >&2"), os.getcwd())
    print(subprocess.run(["pwd", "-P"], capture_output=True).stdout)
    pid = os.posix_spawn("/bin/cat", ["cat", "numbers.txt"], os.environ,
                         file_actions=[(os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0)])
    print(os.waitpid(pid, 0)[1])


def beside_children(root):
    """Reads in threads while children close and duplicate descriptors. Prints the number of files, and the files that were wrong."""
    expected = {path: digest(path) for path in files(root)}
    stop = threading.Event()
    wrong = []

    def read():
        opened = {path: open(path, "rb") for path in list(expected)[:20]}
        while not stop.is_set():
            for path, digest_expected in expected.items():
                if digest(path) != digest_expected:
                    wrong.append(path)
            for path, file in opened.items():
                file.seek(0)
                if hashlib.sha256(file.read()).hexdigest() != expected[path]:
                    wrong.append(path)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    numbers = f"{root}/data/numbers.txt"
    for _ in range(60):
        with open(numbers, "rb") as file:
            found = subprocess.run(["sha256sum"], stdin=file, capture_output=True, close_fds=True).stdout
            if found.split()[0].decode() != expected[numbers]:
                wrong.append(found)
    stop.set()
    for thread in threads:
        thread.join()
    print(len(expected), wrong)


def pools(root):
    names = files(root)
    opened = open(names[0], "rb")
    opened.read(3)
    for method in ["fork", "spawn", "forkserver"]:
        with multiprocessing.get_context(method).Pool(3) as pool:
            print(method, hashlib.sha256("".join(pool.map(digest, names)).encode()).hexdigest())
    print(opened.read(3))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
