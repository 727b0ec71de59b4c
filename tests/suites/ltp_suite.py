"""Runs system call tests of the Linux Test Project: those that read and write files or start programs.

Tests that change the machine are left out. Each test runs in PID, mount, IPC and UTS namespaces of its own, so that it does not
affect other tests or this machine.
"""

import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

from session import ATTACHED, IDLE

# Families of tests that change the clock, kernel modules, swap, quotas, keys or other state of the machine, that load its memory,
# or that need devices.
LEFT_OUT = """
acct add_key adjtimex bpf_map bpf_prog clock_adjtime clock_settime delete_module dirtyc dirtyc0w_shmem dirtypipe fanotify finit_module
fsconfig fsmount fsopen fspick init_module ioctl ioctl_ficlone ioctl_ficlonerange ioctl_fiemap ioctl_getlbmd ioctl_loop ioctl_sg ioperm
iopl ioprio_set keyctl leapsec listmount madvise mbind migrate_pages mount mount_setattr move_mount move_pages msgstress open_tree
perf_event_open pivot_root process_madvise quotactl reboot request_key sched_setattr sched_setparam sched_setscheduler set_mempolicy
setdomainname sethostname settimeofday statmount stime swapoff swapon syslog sysctl umount umount2 userfaultfd vhangup
""".split()

SECONDS_MAX = 120


def root():
    return Path(os.environ.get("DAYFLY_SUITES", "")) / "ltp"


def missing():
    if not os.environ.get("DAYFLY_SUITES"):
        return "DAYFLY_SUITES is not set"
    if not (root() / "runtest/syscalls").exists():
        return f"{root()} has no installed LTP"
    if os.geteuid() != 0:
        return "its tests need root"
    return None


def tests():
    found = {}
    for line in (root() / "runtest/syscalls").read_text().splitlines():
        words = line.split(None, 1)
        if len(words) < 2 or line.startswith("#"):
            continue
        name, command = words
        family = re.sub(r"_?\d+[a-zA-Z]?(_64|_16|_v\d)?$|_64$|_16$", "", name)
        program = shlex.split(command)[0]
        if family not in LEFT_OUT and not name.endswith("_16") and (root() / "testcases/bin" / program).exists():
            found[name] = command
    return found


def detach(work):
    """Detaches the loop devices that a test left behind because the test was killed."""
    listed = subprocess.run(["losetup", "-nO", "NAME,BACK-FILE"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        device, _, file = line.strip().partition(" ")
        if file.strip().startswith(f"{work}/"):
            subprocess.run(["losetup", "-d", device], check=False)


def run(session, comparison):
    session.start()
    found = tests()

    def case(name, way):
        with tempfile.TemporaryDirectory(prefix="dfl", dir=session.work) as work:
            # Some tests continue as another user, who must be able to use these folders.
            for folder in [session.work, Path(work)]:
                folder.chmod(0o777)
            environment = {
                "LTPROOT": str(root()), "TMPDIR": work, "LTP_SINGLE_FS_TYPE": "tmpfs", "LTP_COLORIZE_OUTPUT": "0",
                "PATH": f"{root()}/testcases/bin:{os.environ['PATH']}",
            }  # fmt: skip
            isolated = ["unshare", "-mpiu", "--fork", "--mount-proc", "--kill-child", "sh", "-c", found[name]]
            status, output = session.run(way, isolated, SECONDS_MAX, environment, work)
            detach(work)
            result = {0: "pass", 32: "not for this machine", None: "timed out"}.get(status, f"status {status}")
            return {name: (result, output)}

    comparison.run_all(list(found), [IDLE, ATTACHED], case)
