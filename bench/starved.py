#!/usr/bin/env python3
"""Measures what readers and a stage-in notice while their servers get no processor for seconds. `bench/starved.sh` runs it.

usage: bench/starved.py [--runs N] [--no-goals] --sizes OPTIONS FOLDER [ROW...]
"""

import argparse, json, math, os, statistics, subprocess, sys, threading, time

NODES = 4
READERS_PER_NODE = 2
# How long the epochs of a quiet run take, in seconds, and how long any run may take.
QUIET_S = 60
LONGEST_S = 1200
# A group is frozen for so long, so often, in seconds.
FROZEN_S, FROZEN_EVERY_S = 7, 30
# The share of a processor that each server gets.
SLOW_SHARE = 0.05
# What starvation may cost beyond what it takes away.
SLACK = 1.3
ROWS = ["busy", "slow", "frozen", "servers-frozen", "one-frozen"]
IS_V2 = os.path.exists("/sys/fs/cgroup/cgroup.controllers")


class Group:
    """A control group, in version 2 or in the hierarchies of version 1."""

    def __init__(self, name):
        roots = [""] if IS_V2 else ["cpu", "freezer", "cpuacct"]
        self.folders = {root: f"/sys/fs/cgroup/{root}/{name}" for root in roots}
        for folder in self.folders.values():
            os.makedirs(folder, exist_ok=True)
            if IS_V2:
                with open(f"{os.path.dirname(folder)}/cgroup.subtree_control", "w") as opened:
                    opened.write("+cpu")

    def folder(self, controller):
        return self.folders["" if IS_V2 else controller]

    def write(self, controller, file, value):
        with open(f"{self.folder(controller)}/{file}", "w") as opened:
            opened.write(str(value))

    def add(self, pid):
        for folder in self.folders.values():
            with open(f"{folder}/cgroup.procs", "w") as opened:
                opened.write(str(pid))

    def freeze(self, is_frozen):
        if IS_V2:
            self.write("", "cgroup.freeze", int(is_frozen))
        else:
            self.write("freezer", "freezer.state", "FROZEN" if is_frozen else "THAWED")

    def limit(self, share):
        """Limits the group to a share of one processor, or not at all if it is None."""
        quota_us = int(share * 100_000) if share else None
        if IS_V2:
            self.write("", "cpu.max", f"{quota_us or 'max'} 100000")
        else:
            self.write("cpu", "cpu.cfs_quota_us", quota_us or -1)

    def seconds(self):
        """Seconds of processors that the group has used."""
        if IS_V2:
            with open(f"{self.folder('')}/cpu.stat") as opened:
                return int(opened.readline().split()[1]) / 1e6
        with open(f"{self.folder('cpuacct')}/cpuacct.usage") as opened:
            return int(opened.read()) / 1e9

    def remove(self):
        for folder in self.folders.values():
            os.rmdir(folder)


class Run:
    """One session with its readers, and one stage-in while they read."""

    def __init__(self, folder, source, sizes):
        self.folder, self.source, self.sizes = folder, os.path.join(folder, source), sizes
        names = {"all": "", "others": "/others", "servers": "/servers"} | {node: f"/servers/{node}" for node in range(NODES)}
        self.groups = {name: Group(f"dayfly-starved{path}") for name, path in names.items()}
        data = os.path.join(folder, "data")
        subprocess.run(["rm", "-rf", data], check=True)
        os.makedirs(data)
        self.environment = dict(os.environ, DAYFLY_RUNTIME_DIR=data)
        self.messages = open(os.path.join(folder, "messages"), "w+")
        up = ["dayfly", "up", "--foreground", "--local", str(NODES), "--memory", "128MiB", "--capacity", "2GiB", "--data-dir", data]
        self.up = subprocess.Popen(up, stdout=subprocess.PIPE, stderr=self.messages, text=True, env=self.environment)
        self.session = self.up.stdout.readline().strip()
        self.environment["DAYFLY_SESSION"] = self.session
        for node in range(NODES):
            lock = os.path.join(data, f"dayfly-{os.geteuid()}", self.session, f"node-{node}.lock")
            with open(lock) as opened:
                self.groups[node].add(int(opened.read()))
        self.groups["others"].add(self.up.pid)
        self.dayfly("stage-in", self.source, "/dayfly/set")
        self.dayfly("tune", "--cache", "off")
        self.readers = []
        for number in range(NODES * READERS_PER_NODE):
            command = ["dayfly-bench", "epochs", "--no-order", "--node", str(number % NODES), *sizes]
            reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.messages, text=True, env=self.environment)
            self.groups["others"].add(reader.pid)
            self.readers.append(reader)
        for reader in self.readers:
            assert reader.stdout.readline() == "ready\n", "a reader did not begin"

    def dayfly(self, *arguments):
        return subprocess.run(["dayfly", *arguments], env=self.environment, check=True, stdout=subprocess.DEVNULL, stderr=self.messages)

    def read(self, epochs, rate, disturb):
        """Reads epochs beside a stage-in. Returns what was noticed."""
        found = {"errors": 0, "wrong": 0, "longest_ms": 0.0}
        lock, before = threading.Lock(), self.groups["servers"].seconds()

        def follow(reader):
            for _ in range(epochs):
                print("epoch", file=reader.stdin, flush=True)
                for line in reader.stdout:
                    words = line.split()
                    if words[0] == "part":
                        with lock:
                            found["errors"] += int(words[6])
                            found["wrong"] += int(words[7])
                            found["longest_ms"] = max(found["longest_ms"], float(words[5]))
                    elif words[0] == "end":
                        break
                else:
                    # The reader has given up.
                    with lock:
                        found["errors"] += 1
                    return

        start, is_over = time.monotonic(), threading.Event()
        threads = [threading.Thread(target=follow, args=(reader,), daemon=True) for reader in self.readers]
        threads.append(threading.Thread(target=disturb, args=(self, is_over), daemon=True))
        stage_in = ["dayfly", "stage-in", "--replace", "--max-rate", str(rate), self.source, "/dayfly/second"]
        staging = subprocess.Popen(stage_in, env=self.environment, stdout=subprocess.DEVNULL, stderr=self.messages)
        self.groups["others"].add(staging.pid)
        for thread in threads:
            thread.start()
        for thread in threads[:-1]:
            thread.join(LONGEST_S)
        found["read_s"] = time.monotonic() - start
        found["failed_stage_ins"] = int(staging.wait(LONGEST_S) != 0)
        found["total_s"] = time.monotonic() - start
        is_over.set()
        threads[-1].join(60)
        found["server_seconds"] = self.groups["servers"].seconds() - before
        status = subprocess.run(["dayfly", "status", "--json"], env=self.environment, stdout=subprocess.PIPE)
        found["lost"] = sum(node.get("lost_for_ms") is not None for node in json.loads(status.stdout)["nodes"])
        self.messages.seek(0)
        lines = self.messages.readlines()
        found["lost"] += sum(" is lost" in line for line in lines)
        found["begun_again"] = sum("begins again" in line for line in lines)
        if any(found[name] for name in ("errors", "wrong", "lost", "begun_again", "failed_stage_ins")):
            sys.stderr.writelines(lines[:20])
        return found

    def end(self):
        for reader in self.readers:
            reader.stdin.close()
            reader.wait(60)
        self.dayfly("down")
        self.up.wait(60)
        for group in reversed(self.groups.values()):
            group.remove()


def quiet(run, is_over):
    is_over.wait()


def busy(run, is_over):
    loops = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(8 * os.cpu_count())]
    is_over.wait()
    for loop in loops:
        loop.kill()
        loop.wait()


def slow(run, is_over):
    for node in range(NODES):
        run.groups[node].limit(SLOW_SHARE)
    is_over.wait()
    for node in range(NODES):
        run.groups[node].limit(None)


def freezing(group, times=math.inf, frozen_s=FROZEN_S):
    def freeze(run, is_over):
        done = 0
        while done < times and not is_over.wait(FROZEN_EVERY_S - frozen_s if times > 1 else FROZEN_S):
            run.groups[group].freeze(True)
            time.sleep(frozen_s)
            run.groups[group].freeze(False)
            done += 1

    return freeze


DISTURB = {
    "quiet": quiet,
    "busy": busy,
    "slow": slow,
    "frozen": freezing("all"),
    "servers-frozen": freezing("servers"),
    "one-frozen": freezing(NODES - 1, times=1, frozen_s=12),
}


def measure(options, source, row, epochs):
    run = Run(options.folder, source, options.sizes.split())
    try:
        if epochs is None:
            epochs = max(1, round(QUIET_S / run.read(1, 10**12, quiet)["read_s"]))
        rate = os.path.getsize(run.source) // (QUIET_S * 3 // 4)
        return epochs, run.read(epochs, rate, DISTURB[row])
    finally:
        run.end()


def longest(row, calm):
    """Returns the longest time that a row may take, in seconds; None if there is no goal."""
    if row == "slow":
        return SLACK * calm["server_seconds"] / (NODES * SLOW_SHARE)
    return SLACK * calm["total_s"] * FROZEN_EVERY_S / (FROZEN_EVERY_S - FROZEN_S) if row.endswith("frozen") else None


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-goals", action="store_true")
    parser.add_argument("--sizes", required=True)
    parser.add_argument("folder")
    parser.add_argument("rows", nargs="*")
    options = parser.parse_intermixed_args()
    for row in options.rows:
        if row not in ROWS:
            parser.error(f"unknown row '{row}'; rows: {' '.join(ROWS)}")
    names = ["errors", "wrong", "begun_again", "failed_stage_ins", "lost"]
    print(f"{'source':17} {'row':15} {' '.join(f'{name:>16}' for name in names)} {'longest read, s':>16} {'time, s':>8} {'goal, s':>8}")
    missed = False
    for source in ("plain.tar", "compressed.tar.gz"):
        epochs = None
        for row in options.rows or ROWS:
            results, goals = [], []
            for _ in range(options.runs):
                # The quiet run is measured in the same minute.
                epochs, calm = measure(options, source, "quiet", epochs)
                results.append(measure(options, source, row, epochs)[1])
                goals.append(longest(row, calm))
            worst = [max(result[name] for result in results) for name in names]
            times = [result["total_s"] for result in results]
            is_missed = any(worst) or goals[0] is not None and statistics.median(time / goal for time, goal in zip(times, goals)) > 1
            missed = missed or is_missed
            goal = "" if goals[0] is None else f"{statistics.median(goals):.0f}"
            waited_s = max(result["longest_ms"] for result in results) / 1e3
            print(f"{source:17} {row:15} {' '.join(f'{value:16}' for value in worst)} {waited_s:16.1f} {statistics.median(times):8.0f} {goal:>8}{'  MISSED' if is_missed else ''}", flush=True)
    sys.exit(int(missed and not options.no_goals))


main()
