"""Compares results case by case, and with a list of expected differences."""

import fnmatch
import os
import threading
from concurrent.futures import ThreadPoolExecutor

from session import PLAIN

# How many times a group of cases runs at most. It runs again if its results differ, because a case that sometimes fails without the
# library proves nothing.
REPEATS = 3


class Comparison:
    def __init__(self, suite, expected):
        self.suite = suite
        self.expected = read_expected(expected)
        self.lock = threading.Lock()
        # For each way: the number of cases, the number that pass without the library, and the number that pass with it.
        self.counts = {}
        # For each case that differs: the way, the case, and the reason why this is expected, or None.
        self.differences = []

    def run_all(self, groups, ways, run):
        """Runs `run(group, way)`, which returns {case: (result, detail)}, for all groups of cases, several at a time."""
        workers = int(os.environ.get("DAYFLY_SUITES_JOBS", os.cpu_count()))
        only = os.environ.get("DAYFLY_SUITES_ONLY", "*")
        groups = [group for group in groups if any(fnmatch.fnmatchcase(group, pattern) for pattern in only.split(","))]
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(lambda group: self.run_group(group, ways, run), groups):
                pass

    def run_group(self, group, ways, run):
        plain = collect({}, run(group, PLAIN))
        for way in ways:
            ours = collect({}, run(group, way))
            for _ in range(REPEATS - 1):
                if not different(plain, ours):
                    break
                collect(plain, run(group, PLAIN))
                collect(ours, run(group, way))
            self.note(way, plain, ours)

    def note(self, way, plain, ours):
        with self.lock:
            cases, passed_plain, passed = self.counts.get(way, (0, 0, 0))
            count = lambda results: sum(any(result.startswith("pass") for result, _ in found) for found in results.values())
            self.counts[way] = (cases + len(plain), passed_plain + count(plain), passed + count(ours))
            for case in different(plain, ours):
                before, after = plain.get(case, [("absent", "")]), ours.get(case, [("absent", "")])
                reason = self.reason(way, case)
                self.differences.append((way, case, reason))
                mark = f"expected ({reason})" if reason else "DIFFERS"
                print(f"{self.suite} {way} {case}: {mark}: {before[-1][0]} -> {after[-1][0]}", flush=True)
                if not reason:
                    print("\n".join(f"    {line[:200]}" for line in after[-1][1].strip().splitlines()[-12:]), flush=True)

    def reason(self, way, case):
        for ways, pattern, reason in self.expected:
            if way in ways and fnmatch.fnmatchcase(case, pattern):
                return reason
        return None

    def report(self):
        """Prints the totals. Returns whether every difference is in the list."""
        for way, (cases, plain, ours) in sorted(self.counts.items()):
            print(f"{self.suite} {way}: of {cases} cases {plain} pass without the library, {ours} with it", flush=True)
        # If no case passes even without the library, the suite was not run properly.
        is_sound = bool(self.counts) and all(plain > 0 for _, plain, _ in self.counts.values())
        return is_sound and all(reason for _, _, reason in self.differences)


def collect(all_results, results):
    """Adds the results of one run to those of earlier runs."""
    for case, result in results.items():
        all_results.setdefault(case, []).append(result)
    return all_results


def different(plain, ours):
    """Returns the cases that never had the same result in both ways."""
    only = lambda results, case: {result for result, _ in results.get(case, [("absent", "")])}
    return sorted(case for case in plain.keys() | ours.keys() if not only(plain, case) & only(ours, case))


def read_expected(path):
    """Reads lines of the form `WAY[,WAY] CASE  REASON`, where CASE may be a glob."""
    expected = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split(None, 2)
        if len(words) < 3:
            raise ValueError(f"{path}:{number}: a line needs ways, a case and a reason")
        expected.append((words[0].split(","), words[1], words[2]))
    return expected
