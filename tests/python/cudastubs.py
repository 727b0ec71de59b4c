"""Makes PyTorch from PyPI importable on a machine without CUDA, and without the gigabytes of NVIDIA's packages.

PyTorch's libraries are linked with NVIDIA's. This writes libraries of the same names into a site-packages folder: each has the
symbols that PyTorch wants, and every function of theirs says that there is no device.

    python cudastubs.py SITE
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NVIDIA = ("libcu", "libnv", "libnccl")
#: Symbols without a version that belong to NVIDIA's libraries.
UNVERSIONED = re.compile(
    r"_*(cu[A-Z]|cuda|cublas|cudnn|cusparse|cufft|cusolver|cufile|cuFile|cupti|nvrtc|nvJit|nvshmem|nccl[A-Z])|_Z.*nvshmem"
)
NO_DEVICE = 100


def readelf(option: str, library: Path) -> str:
    return subprocess.run(["readelf", option, "-W", str(library)], capture_output=True, text=True, check=True).stdout


class Wanted:
    """What a set of libraries wants from NVIDIA's libraries."""

    def __init__(self, libraries: list[Path]):
        self.names: set[str] = set()
        self._file_of_version: dict[str, str] = {}
        undefined: set[str] = set()
        defined: set[str] = set()
        for library in libraries:
            self._read_needed(library)
            for line in readelf("--dyn-syms", library).splitlines():
                fields = line.split()
                if len(fields) >= 8 and fields[6] == "UND":
                    undefined.add(fields[7])
                elif len(fields) >= 8:
                    defined.add(fields[7].split("@")[0])
        # Symbols by library and version.
        self.symbols: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for symbol in undefined:
            name, _, version = symbol.partition("@")
            file = self._file_of_version.get(version, "")
            if version and file.startswith(NVIDIA):
                self.symbols[file][version].add(name)
            elif not version and UNVERSIONED.match(name) and name not in defined:
                self.symbols[self._file_of(name)][""].add(name)

    def _read_needed(self, library: Path) -> None:
        needed = re.findall(r"NEEDED.*\[(.*?)\]", readelf("-d", library))
        self.names.update(name for name in needed if name.startswith(NVIDIA))
        file = ""
        for line in readelf("-V", library).splitlines():
            if found := re.search(r"File: (\S+)", line):
                file = found[1]
            if file and (found := re.search(r"Name: (\S+)\s+Flags", line)):
                self._file_of_version.setdefault(found[1], file)

    def _file_of(self, symbol: str) -> str:
        """Returns the library that a symbol belongs to, by its name."""
        bare = symbol.lower().lstrip("_")
        for file in sorted(self.names):
            stem = file.split(".")[0].removeprefix("lib").lower().replace("_host", "")
            if bare.startswith(stem) or (stem == "cudart" and bare.startswith("cuda")):
                return file
        return next((file for file in sorted(self.names) if file.startswith("libcudart")), "libcudart.so")


def source_of(symbols: set[str]) -> str:
    lines = []
    for symbol in sorted(symbols):
        if symbol.endswith(("GetErrorString", "GetErrorName", "StatusString")):
            lines.append(f'const char *{symbol}() {{ return "no CUDA device"; }}')
        elif symbol == "cudaGetDeviceCount":
            lines.append(f"int {symbol}(int *count) {{ *count = 0; return {NO_DEVICE}; }}")
        elif symbol.startswith("__cudaRegister"):
            lines.append(f"static void *handle_{symbol}; void *{symbol}() {{ return &handle_{symbol}; }}")
        else:
            lines.append(f"long {symbol}() {{ return {NO_DEVICE}; }}")
    return "\n".join(lines) + "\n"


def main(site: Path) -> None:
    folder = site / "torch" / "lib"  # PyTorch's libraries look here first.
    libraries = [*folder.glob("*.so*"), *site.glob("torch/*.so"), *site.glob("torchvision/*.so")]
    wanted = Wanted([library for library in libraries if not library.name.startswith(NVIDIA)])
    # The driver's library is opened at run time.
    names = (wanted.names | set(wanted.symbols)) - {"libcuda.so.1"}
    with tempfile.TemporaryDirectory() as scratch:
        code, versions = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        for name in sorted(names):
            by_version = wanted.symbols.get(name, {})
            code.write_text(source_of(set().union(*by_version.values())) if by_version else "")
            command = ["gcc", "-shared", "-fPIC", "-w", "-O1", "-fno-builtin", "-o", str(folder / name), f"-Wl,-soname,{name}", str(code)]
            named = {version: symbols for version, symbols in by_version.items() if version}
            if named:
                versions.write_text("".join(f"{v} {{ global: {'; '.join(sorted(s))}; }};\n" for v, s in named.items()))
                command.append(f"-Wl,--version-script={versions}")
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
