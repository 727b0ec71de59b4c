#!/usr/bin/env python3
"""Prints the table of what `node_loss.py` measured.

usage: bench/node_loss_table.py [--no-goals] FILE

FILE has one line of JSON for each session, or for each time that a node failed. A goal about readers (errors, wrong bytes, waits,
reads of origins) must be reached in every run; a goal about a rate must be reached by the median. The exit status is 1 if a
goal was missed, or if a value is missing.
"""

import argparse, json, sys

# A read waits at most this long for a node that falls silent, in ms: the deadline of a request, and a second for everything else.
SILENT_MS = 5000 + 1000
# A read that meets a killed server takes at most this long, in ms.
KILLED_MS = 1000


class AtMost:
    """A goal that every run must reach."""

    def __init__(self, limit):
        self.limit = limit

    def __str__(self):
        return f"<= {self.limit:g}"

    def is_reached(self, values):
        return values[-1] <= self.limit


class AtLeast:
    """A goal that the median must reach."""

    def __init__(self, limit):
        self.limit = limit

    def __str__(self):
        return f">= {self.limit:g}"

    def is_reached(self, values):
        return values[len(values) // 2] >= self.limit


NOTHING = AtMost(0)


def noticed(limit_ms):
    return [("errors", "read errors", NOTHING), ("wrong", "samples with wrong bytes", NOTHING), ("longest_ms", "longest read, ms", AtMost(limit_ms))]


def killed(ratio, from_origins):
    return [
        *noticed(KILLED_MS),
        ("ratio", "rest of the epoch, x the rate of 3 servers", AtLeast(ratio)),
        ("ratio_before", "the same, x the rate of an epoch before", None),
        ("ratio_recovered", "an epoch after recovery, x the rate of 3", None),
        ("epoch_origins", "read from origins in that epoch, x lost bytes", from_origins),
        ("origins", "the same until all is recovered", from_origins),
        ("servers_origins", "the same as the servers count it", from_origins),
        ("later_origins", "bytes from origins in a later epoch", NOTHING),
        ("not_recovered", "not recovered in time", NOTHING),
    ]


GONE = [*noticed(SILENT_MS), ("not_lost", "not lost in time", NOTHING)]
PASSING = [
    *noticed(SILENT_MS),
    ("later_origins", "bytes from origins in a later epoch", NOTHING),
    ("changed_owners", "nodes that own other blocks than before", NOTHING),
    ("fetched", "fetched from the node in an epoch, x before", None),
    ("return_s", "seconds until all nodes are members", None),
    ("settled_s", "seconds from then until no origin is read", None),
]
# The lines of the table for each row: the value's name, its title, and its goal.
ROWS = {
    "killed": killed(0.7, None),
    "copies": [*killed(0.95, NOTHING), ("ratio_plain", "rest of the epoch, x that of 3 with one copy", AtLeast(0.95))],
    "silent": GONE,
    "link-3": PASSING,
    "link-5": PASSING,
    "link-20": PASSING,
    "stop-8": PASSING,
    "stop-20": PASSING,
    "hang-60": PASSING,
    "cut-off": [*GONE, ("still_running", "its server has not ended in time", NOTHING)],
    "power-loss": GONE,
    "ft-hvac": [
        *noticed(KILLED_MS),
        ("none_s", "20 epochs without a loss, s", None),
        ("losses_s", "20 epochs with four losses, s", None),
        ("first-touch_s", "the same, recached on first touch only, s", None),
        ("to_none", "losses, x the time without", None),
        ("to_first-touch", "losses, x the time with first touch only", None),
        ("losses_origins", "read from origins, MB", None),
        ("first-touch_origins", "the same, first touch only, MB", None),
    ],
}


def runs_of(lines):
    """Joins the sessions that belong to one run: the n-th of each part."""
    by_part = {}
    for line in lines:
        by_part.setdefault(line["part"], []).append(line)
    for number in range(max(map(len, by_part.values()), default=0)):
        run = {}
        for part, all_runs in by_part.items():
            values = all_runs[number] if number < len(all_runs) else {"errors": 1}
            for name, value in values.items():
                if name in ("errors", "wrong", "longest_ms"):
                    run[name] = max(run.get(name, 0), value)
                elif part == "plain":
                    run[f"{part}_{name}"] = value
                elif name == "total_s":
                    run[f"{part}_s"] = value
                elif part in ("none", "losses", "first-touch"):
                    run[f"{part}_{name}"] = value / 1e6 if name == "origins" else value
                else:
                    run[name] = value
        if {"rate", "reference"} <= run.keys():
            run["ratio"] = run["rate"] / run["reference"]
        if {"recovered_rate", "reference"} <= run.keys():
            run["ratio_recovered"] = run["recovered_rate"] / run["reference"]
        if {"rate", "plain_reference"} <= run.keys():
            run["ratio_plain"] = run["rate"] / run["plain_reference"]
        if {"rate", "whole"} <= run.keys():
            run["ratio_before"] = run["rate"] / run["whole"]
        for other in ("none", "first-touch"):
            if {"losses_s", f"{other}_s"} <= run.keys():
                run[f"to_{other}"] = run["losses_s"] / run[f"{other}_s"]
        yield run


def shown(value):
    return f"{value:.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.2f}"


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--no-goals", action="store_true")
    parser.add_argument("file")
    options = parser.parse_args()
    by_row = {}
    with open(options.file) as file:
        for line in map(json.loads, file):
            by_row.setdefault(line.pop("row"), []).append(line)
    form = "{:<11} {:<45} {:>8} {:>9} {:>9} {:>9}  {}"
    print(form.format("row", "", "goal", "median", "min", "max", ""))
    has_missed = False
    for row, lines in by_row.items():
        runs = list(runs_of(lines))
        for name, title, goal in ROWS[row]:
            values = sorted(run[name] for run in runs if run.get(name) is not None)
            is_complete = len(values) == len(runs)
            is_reached = is_complete and (goal is None or goal.is_reached(values))
            has_missed |= not is_reached
            figures = [shown(values[at]) for at in (len(values) // 2, 0, -1)] if values else ["-"] * 3
            verdict = ("" if goal is None else "pass") if is_reached else "MISSED" if is_complete else "MISSING"
            print(form.format(row, title, str(goal or ""), *figures, verdict).rstrip())
    return int(has_missed and not options.no_goals)


sys.exit(main())
