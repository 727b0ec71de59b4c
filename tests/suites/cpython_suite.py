"""Runs CPython's own tests of files, processes, signals, threads, sockets and asyncio, with the interpreter of Debian's package.

With the way `inside`, the interpreter imports the standard library, extension modules included, from the namespace.
"""

import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from session import ATTACHED, IDLE, INSIDE

PYTHON = Path("/usr/bin/python3.11")
LIBRARY = Path("/usr/lib/python3.11")

MODULES = """
test_asynchat test_asyncio test_asyncore test_atexit test_bz2 test_builtin test_cmd_line test_cmd_line_script test_codecs test_compileall
test_concurrent_futures test_dbm test_dbm_dumb test_dbm_gnu test_devpoll test_eintr test_epoll test_faulthandler test_fcntl test_file
test_file_eintr test_filecmp test_fileinput test_fileio test_fileutils test_fork1 test_ftplib test_functools test_genericpath test_getpass
test_getpath test_glob test_gzip test_httplib test_httpservers test_imp test_import test_importlib test_io test_ioctl test_json
test_largefile test_linecache test_logging test_lzma test_mailbox test_marshal test_mimetypes test_mmap
test_multiprocessing_fork test_multiprocessing_forkserver test_multiprocessing_main_handling test_multiprocessing_spawn test_ntpath
test_openpty test_os test_pathlib test_pickle test_pipes test_pkg test_pkgutil test_platform test_poll test_popen test_poplib test_posix
test_posixpath test_pty test_py_compile test_pwd test_resource test_runpy test_select test_selectors test_shelve test_shutil test_signal
test_site test_smtplib test_socket test_socketserver test_stat test_subprocess test_support test_sys test_tarfile test_tempfile
test_thread test_threadedtempfile test_threading test_threading_local test_threadsignals test_time test_timeout test_univnewlines
test_urllib test_urllib2_localnet test_uuid test_venv test_wait3 test_wait4 test_xmlrpc test_zipapp test_zipfile test_zipimport test_zlib
""".split()

SECONDS_MAX = 900
# In some virtual machines, a connection to the host is never established: these tests hang without the library too.
IGNORED = ["*VSOCK*"]


def missing():
    if not PYTHON.exists():
        return f"{PYTHON} is missing (package python3.11)"
    if not (LIBRARY / "test/test_os.py").exists():
        return f"{LIBRARY}/test is missing (package libpython3.11-testsuite)"
    return None


def run(session, comparison):
    tree = session.work / "home"
    (tree / "lib").mkdir(parents=True)
    copy = tree / "lib/python3.11"
    shutil.copytree(LIBRARY, copy, symlinks=False, ignore=shutil.ignore_patterns("__pycache__"), ignore_dangling_symlinks=True)
    # Without bytecode files, every import would compile its module.
    subprocess.run([PYTHON, "-m", "compileall", "-q", "-j0", "--invalidation-mode", "unchecked-hash", copy], check=False, capture_output=True)
    session.start(tree)
    shutil.rmtree(tree)

    def group(module, way, home):
        with tempfile.TemporaryDirectory(prefix="dfp", dir=session.work) as work:
            environment = {"TMPDIR": work, "TMP": work, "PYTHONDONTWRITEBYTECODE": "1"}
            if home:
                environment["PYTHONHOME"] = str(session.tree(way))
            report = Path(work) / "report.xml"
            arguments = [PYTHON, "-m", "test", "--junit-xml", report, "--timeout", SECONDS_MAX - 60]
            arguments += [word for pattern in IGNORED for word in ["-i", pattern]] + [module]
            status, output = session.run(way, arguments, SECONDS_MAX, environment, work)
            return results(module, report, status, output)

    comparison.run_all(MODULES, [IDLE, ATTACHED], lambda module, way: group(module, way, False))
    comparison.run_all(MODULES, [INSIDE], lambda module, way: group(module, way, True))


def results(module, report, status, output):
    """Returns the result of each case, or the result of the whole module if it ended before it reported any case."""
    found = {}
    if report.exists():
        for case in ElementTree.parse(report).iter("testcase"):
            failure = next((part for part in case if part.tag in ("failure", "error")), None)
            skipped = case.find("skipped") is not None
            result = "fail" if failure is not None else "skip" if skipped else "pass"
            found[(case.get("name") or module).split(" ")[0]] = (result, "" if failure is None else failure.text or "")
    return found or {module: ("pass" if status == 0 else f"status {status}", output)}
