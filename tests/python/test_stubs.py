"""The stubs describe the native module, and users' type checkers accept the package."""

import subprocess
import sys

PROGRAM = """\
import dayfly
import dayfly.torch

session: dayfly.Session = dayfly.attach()
names: list[str] = [entry.name for entry in session.list("/dayfly")]
data = session.dataset("/dayfly/train")
sizes: list[int] = data.sizes().tolist()
samples = dayfly.torch.Samples("/dayfly/train")
"""


def mypy(folder, module, *arguments):
    # A cache appears in the working folder.
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# What differs from the stubs on purpose.
DIFFERENCES = r"""
# Names of types, for the package's own code.
dayfly._dayfly.(Path|IdsLike)
# What pickles call, and PyO3's list of names.
dayfly._dayfly.(_re.*|__all__)
# Before Python 3.12, the buffer protocol has no method.
dayfly._dayfly.(Array|View).__buffer__
# Python iterates over an array by its `__getitem__`.
dayfly._dayfly.Array.__iter__
"""


def test_the_stubs_describe_the_native_module(tmp_path):
    differences = tmp_path / "differences"
    differences.write_text(DIFFERENCES)
    mypy(tmp_path, "mypy.stubtest", "dayfly._dayfly", "--allowlist", str(differences), "--ignore-unused-allowlist")


def test_a_program_that_uses_the_package_is_accepted(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    mypy(tmp_path, "mypy", "--strict", str(program))
