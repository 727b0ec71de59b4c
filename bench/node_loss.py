#!/usr/bin/env python3
"""Measures what readers notice when nodes of their session fail. `bench/node-loss.sh` runs it; METHOD.md explains the rows.

usage: bench/node_loss.py CASE

Runs in a session that `namespaces.py --outside` has started, and prints lines of JSON for `node_loss_table.py`.
"""

import json, os, queue, signal, subprocess, sys, threading, time
from dataclasses import dataclass

# How long other nodes may take to notice that a node answers again, in seconds: they ask a suspect at least every 8 s, and wait 5 s
# for its answer.
SETTLE_S = 8 + 5
# How long a lost node that answers again may take until it is a member, in seconds.
RETURN_S = 30
# When a silent server is lost, and when it ends by itself, in seconds: the defaults of `--lost-after` and of the lease.
LOST_S = 30
LEASE_S = 90
# How long other nodes may take to recover what was lost, in seconds.
RECOVERY_S = 120
# How long an epoch may take, in seconds.
EPOCH_S = 300


def setting(name):
    return os.environ["NODE_LOSS_" + name]


class ReaderEnded(Exception):
    pass


@dataclass
class Part:
    """What one reader read in a part of an epoch."""

    epoch: int
    seconds: float
    bytes: int
    samples: int
    longest_ms: float
    errors: int
    wrong: int


class Readers:
    """One reader on each of the first nodes. They begin their epochs together."""

    def __init__(self, nodes):
        self.lines = queue.Queue()
        self.readers = []
        for node in range(nodes):
            command = ["ip", "netns", "exec", f"df{node}", "dayfly-bench", "epochs", "--node", str(node), *setting("SIZES").split()]
            reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ, DAYFLY_NODE=str(node)))
            threading.Thread(target=self.pass_on, args=(node, reader), daemon=True).start()
            self.readers.append(reader)
        self.longest_ms = self.errors = self.wrong = 0
        self.bytes_read = 0
        waiting = set(range(nodes))
        while waiting:
            node, words = self.next()
            assert words == ["ready"], words
            waiting.remove(node)

    def pass_on(self, node, reader):
        for line in reader.stdout:
            self.lines.put((node, line.split()))
        self.lines.put((node, None))

    def next(self):
        node, words = self.lines.get(timeout=EPOCH_S)
        if words is None:
            self.errors += 1
            raise ReaderEnded(f"the reader on node {node} ended")
        return node, words

    def tell(self, line):
        for reader in self.readers:
            try:
                print(line, file=reader.stdin, flush=True)
            except BrokenPipeError:
                pass  # `next` reports that this reader ended.

    def epoch(self, at_half=None):
        """Reads all samples on all nodes. When the first reader has read half of them, marks the epoch in all readers, and calls
        `at_half`. Returns the last part of each reader."""
        start = time.monotonic()
        self.tell("epoch")
        last = {}
        ended = 0
        while ended < len(self.readers):
            node, words = self.next()
            if words[0] == "half" and at_half:
                self.tell("mark")
                at_half()
                at_half = None
            elif words[0] == "part":
                part = Part(int(words[1]), float(words[2]), int(words[3]), int(words[4]), float(words[5]), int(words[6]), int(words[7]))
                last[node] = part
                self.longest_ms = max(self.longest_ms, part.longest_ms)
                self.errors += part.errors
                self.wrong += part.wrong
                self.bytes_read += part.bytes
            elif words[0] == "end":
                ended += 1
        self.epoch_seconds = time.monotonic() - start
        return list(last.values())

    def epochs_for(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.epoch()

    def forget(self):
        self.longest_ms = self.errors = self.wrong = 0

    def noticed(self):
        """What all readers noticed since `forget`."""
        return {"errors": self.errors, "wrong": self.wrong, "longest_ms": self.longest_ms}

    def end(self):
        for reader in self.readers:
            reader.stdin.close()
            try:
                reader.wait(timeout=10)
            except subprocess.TimeoutExpired:
                reader.kill()


def rate(parts):
    """Bytes per second of all readers together, until the last one has ended."""
    return sum(part.bytes for part in parts) / max(part.seconds for part in parts)


def dayfly(*arguments):
    return subprocess.run(["dayfly", *arguments], env=dict(os.environ, DAYFLY_NODE="0"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def must(done):
    if done.returncode:
        sys.exit(f"{done.args} failed: {done.stderr}")
    return done


def status():
    # The command fails while a node does not answer.
    return json.loads(dayfly("status", "--json").stdout)["nodes"]


def pfs_bytes():
    """Bytes that anyone has read from the parallel file system so far, as it counts them itself."""
    counts = setting("COUNTS")
    if os.path.exists(counts):
        os.remove(counts)
    os.kill(int(setting("PFS")), signal.SIGUSR1)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            with open(counts) as file:
                return json.load(file)["bytes"]
        except (FileNotFoundError, json.JSONDecodeError):
            time.sleep(0.01)
    sys.exit("the parallel file system does not answer")


def set_link(node, state):
    subprocess.run(["ip", "link", "set", f"vdf{node}", state], check=True)


def pid(node):
    return int(os.environ[f"DAYFLY_PID_{node}"])


def send(node, number):
    try:
        os.kill(pid(node), number)
    except ProcessLookupError:
        pass


def is_running(node):
    try:
        with open(f"/proc/{pid(node)}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def cut_power(node):
    """No message of the node leaves it anymore, not even the one that its kernel sends when a process dies."""
    set_link(node, "down")
    pids = subprocess.run(["ip", "netns", "pids", f"df{node}"], stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    for one in pids:
        os.kill(int(one), signal.SIGKILL)


def owners():
    """What each node owns: as the nodes say, and as blocks of absent nodes show that another node holds them in their place."""
    return [
        (node.get("blocks"), node.get("held_bytes"), node.get("lost_for_ms"), node.get("recovery", {}).get("wanted", {}).get("blocks"))
        for node in status()
    ]


def wait_until(condition, seconds):
    """Returns the seconds until the condition held, or None."""
    start = time.monotonic()
    while time.monotonic() < start + seconds:
        if condition():
            return time.monotonic() - start
        time.sleep(0.1)
    return None


def prepare(nodes, readers, cached_share, *options):
    """Stages in the set, and reads epochs until a share of it is cached on the readers' nodes."""
    start = time.monotonic()
    must(dayfly("stage-in", *options, setting("SET"), "/dayfly/set"))
    cache = int(int(setting("BYTES")) * cached_share)
    must(dayfly("tune", "--cache", f"{cache}B"))
    started = Readers(readers)
    for _ in range(4):
        started.epoch()
        if wait_until(lambda: min(node["cached_bytes"] for node in status()[:readers]) > 0.9 * cache, 1) is not None:
            break
    cached = [node["cached_bytes"] / int(setting("BYTES")) for node in status()[:readers]]
    resident = int(subprocess.run(["fincore", "-nb", "-o", "RES", setting("SET")], stdout=subprocess.PIPE, text=True, check=True).stdout)
    if resident:
        sys.exit(f"{resident} bytes of the set are in the page cache, so reads of the parallel file system are not cold")
    print(f"{time.monotonic() - start:.1f} s: {nodes} nodes, {readers} readers, an epoch takes {started.epoch_seconds:.1f} s; cached: {', '.join(f'{share:.2f}' for share in cached)} of the set", file=sys.stderr)
    started.forget()
    return started


def rest_of_epoch(readers, fault):
    """Returns the rate of the rest of an epoch after a fault in its middle."""
    return rate(readers.epoch(at_half=fault))


def reference(options):
    """The rate of a session of three nodes in the same part of an epoch, without a fault."""
    readers = prepare(3, 3, 0.2, *options)
    emit({"reference": rest_of_epoch(readers, lambda: None)})
    readers.end()


def killed(options):
    readers = prepare(4, 3, 0.2, *options)
    lost_bytes = status()[3]["held_bytes"]
    before = pfs_bytes()
    whole = rate(readers.epoch())
    result = {"rate": rest_of_epoch(readers, lambda: send(3, signal.SIGKILL)), "whole": whole}
    in_epoch = pfs_bytes() - before
    readers.epoch()

    def is_recovered():
        live = status()
        recoveries = [node["recovery"] for node in live if "recovery" in node]
        return live[3].get("lost_for_ms") is not None and all(recovery["wanted"] == recovery["recovered"] for recovery in recoveries)

    recovered = wait_until(is_recovered, RECOVERY_S)
    result |= {"epoch_origins": in_epoch / lost_bytes, "origins": (pfs_bytes() - before) / lost_bytes}
    result["servers_origins"] = sum(node["origins"]["bytes"] for node in status() if "origins" in node) / lost_bytes
    before = pfs_bytes()
    result["recovered_rate"] = rate(readers.epoch())
    result["later_origins"] = pfs_bytes() - before
    emit(result | readers.noticed() | {"not_recovered": int(recovered is None)})
    readers.end()


def gone(fault, seconds):
    """A node falls silent for good, in the middle of an epoch. Readers go on."""
    readers = prepare(4, 3, 0.2)
    readers.epoch(at_half=fault)
    readers.epochs_for(seconds)
    lost = status()[3].get("lost_for_ms") is not None
    emit(readers.noticed() | {"not_lost": int(not lost), "still_running": int(is_running(3))})
    readers.end()


def passing(seconds, begin, end):
    """A node falls silent for some seconds, several times, while readers go on. Afterward, all is as it was."""
    readers = prepare(4, 3, 0.2)
    for _ in range(int(setting("RUNS"))):
        before = owners()
        fetched_before = fetched()
        readers.epoch()
        per_epoch = fetched() - fetched_before
        readers.forget()
        timer = threading.Timer(seconds, end)

        def fault():
            begin()
            timer.start()

        readers.epoch(at_half=fault)
        while timer.is_alive():
            readers.epoch()
        # A node that was lost tells the supervisor and catches up first.
        returned = wait_until(lambda: all(node.get("lost_for_ms") is None and "error" not in node for node in status()), RETURN_S)
        over = time.monotonic()
        origins = None
        while origins != (origins := pfs_bytes()) and time.monotonic() < over + SETTLE_S:
            settled = time.monotonic() - over
            readers.epoch()
        origins, fetched_before = pfs_bytes(), fetched()
        readers.epoch()
        changed = sum(one != other for one, other in zip(before, owners()))
        result = {"later_origins": pfs_bytes() - origins, "changed_owners": changed, "return_s": returned, "settled_s": settled}
        result["fetched"] = (fetched() - fetched_before) / max(per_epoch, 1)
        emit(result | readers.noticed())
        readers.forget()
    readers.end()


def fetched():
    """Bytes that the readers' nodes have received from node 3."""
    return sum(node["owners"][3]["bytes"] for node in status()[:3])


def hvac(losses):
    """FT-HVAC's experiment: 20 epochs, and losses in the middle of epochs 3, 8, 13 and 18."""
    readers = prepare(6, 2, 0.4)
    before = pfs_bytes()
    start = time.monotonic()
    seconds = []
    for epoch in range(1, 21):
        lost = {3: 5, 8: 4, 13: 3, 18: 2}.get(epoch) if losses else None
        readers.epoch(at_half=None if lost is None else lambda: send(lost, signal.SIGKILL))
        seconds.append(round(readers.epoch_seconds, 2))
    print(f"seconds of the epochs: {seconds}", file=sys.stderr)
    emit(readers.noticed() | {"total_s": time.monotonic() - start, "origins": pfs_bytes() - before})
    readers.end()


def emit(values):
    print(json.dumps({"row": setting("ROW"), "part": setting("PART"), **values}), flush=True)


def stop():
    send(3, signal.SIGSTOP)


def go_on():
    send(3, signal.SIGCONT)


def link_down():
    set_link(3, "down")


def link_up():
    set_link(3, "up")


CASES = {
    "reference": lambda: reference([]),
    "reference-copies": lambda: reference(["--copies", "2"]),
    "killed": lambda: killed([]),
    "killed-copies": lambda: killed(["--copies", "2"]),
    "silent": lambda: gone(stop, LOST_S + 10),
    # The node's server notices that it lost the supervisor, and ends.
    "cut-off": lambda: gone(link_down, LEASE_S + 20),
    "power-loss": lambda: gone(lambda: cut_power(3), LOST_S + 10),
    "link-3": lambda: passing(3, link_down, link_up),
    "link-5": lambda: passing(5, link_down, link_up),
    "link-20": lambda: passing(20, link_down, link_up),
    "stop-8": lambda: passing(8, stop, go_on),
    "stop-20": lambda: passing(20, stop, go_on),
    "hang-60": lambda: passing(60, stop, go_on),
    "hvac-none": lambda: hvac(losses=False),
    "hvac-losses": lambda: hvac(losses=True),
}


def measure(case):
    try:
        CASES[case]()
    except (ReaderEnded, queue.Empty) as error:
        print(f"{case}: {error!r}", file=sys.stderr)
        emit({"errors": 1})
    finally:
        # `namespaces.py` ends the session, which waits for servers that stand still.
        for node in range(16):
            if f"DAYFLY_PID_{node}" in os.environ:
                send(node, signal.SIGCONT)
                if subprocess.run(["ip", "link", "show", f"vdf{node}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0:
                    set_link(node, "up")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in CASES:
        sys.exit(__doc__)
    measure(sys.argv[1])
