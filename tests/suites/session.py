"""A session of one node, and the ways in which a suite's programs run: without the library, and with it."""

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Without the library. The other ways are compared with this one.
PLAIN = "plain"
# With the library, in processes that never touch the namespace.
IDLE = "idle"
# With the library, in processes that attach to the session before their main function.
ATTACHED = "attached"
# With the library, on files of the namespace.
INSIDE = "inside"


class Session:
    """Starts servers on first use, so that a suite that fails early costs little."""

    def __init__(self, work):
        self.work = work
        # Both trees have the same bytes, and paths of the same length.
        self.real = work / "real" / "tree"
        self.prefix = work / "pref" / "tree"
        self.dayfly = os.environ.get("DAYFLY_SUITES_PROGRAM", str(ROOT / "target/release/dayfly"))
        self.id = None
        self.attach = None

    def start(self, tree=None):
        """Starts the session. Everything below `tree` becomes the namespace, and `self.real` a plain copy of it."""
        for folder in ["run", "data"]:
            (self.work / folder).mkdir()
        if tree is None:
            tree = self.work / "little"
            (tree / "folder").mkdir(parents=True)
            (tree / "folder/file").write_text("some words\n")
        archive = self.work / "tree.tar"
        with tarfile.open(archive, "w") as packed:
            packed.add(tree, ".")
        self.real.mkdir(parents=True)
        subprocess.run(["tar", "-xpf", archive, "-C", self.real], check=True)
        self.prefix.parent.mkdir()
        self.id = self.call("up", "--local", "1", "--prefix", str(self.prefix)).strip()
        self.call("stage-in", str(archive), str(self.prefix))
        archive.unlink()
        library = self.work / "attach.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, HERE / "attach.c"], check=True)
        self.attach = library

    def call(self, *arguments):
        return subprocess.run([self.dayfly, *arguments], env=self.environment(), check=True, capture_output=True, text=True).stdout

    def environment(self):
        """Returns the environment for `dayfly` itself."""
        environment = dict(os.environ, DAYFLY_RUNTIME_DIR=str(self.work / "run"), LC_ALL="C.UTF-8", TZ="UTC")
        environment.pop("DAYFLY_SESSION", None)
        environment.setdefault("TMPDIR", str(self.work / "data"))
        return environment

    def command(self, way, arguments):
        """Returns the command that runs a program in one of the ways above."""
        arguments = [str(argument) for argument in arguments]
        if way == PLAIN:
            return arguments
        if way == ATTACHED:
            arguments = ["sh", "-c", 'LD_PRELOAD="$0:$LD_PRELOAD" exec "$@"', str(self.attach), *arguments]
        return [self.dayfly, "exec", "--", *arguments]

    def tree(self, way):
        """Returns the tree that a program uses."""
        return self.prefix if way == INSIDE else self.real

    def run(self, way, arguments, timeout, environment=None, folder=None):
        """Runs a program. Returns its status (None after a timeout) and its output, standard error included."""
        variables = dict(self.environment(), **(environment or {}))
        with subprocess.Popen(
            self.command(way, arguments), env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, errors="replace",
        ) as child:  # fmt: skip
            try:
                output, _ = child.communicate(timeout=timeout)
                return child.returncode, output
            except subprocess.TimeoutExpired:
                return None, "timed out"
            finally:
                # Processes that the program left behind would disturb the next program.
                try:
                    os.killpg(child.pid, 9)
                except ProcessLookupError:
                    pass

    def end(self):
        if self.id:
            subprocess.run([self.dayfly, "down"], env=self.environment(), check=False, capture_output=True)
        for folder in ["real", "pref"]:
            shutil.rmtree(self.work / folder, ignore_errors=True)
