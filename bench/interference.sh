#!/usr/bin/env bash
# Measures how much a stage-in at half its full rate slows a reader of another dataset. The reader runs on one core, the
# servers on another.
# Usage: bench/interference.sh ARCHIVE [RUNS] [NODES]
# Needs two cores, and dayfly and dayfly-bench in PATH. With more than one node, the servers do part of the reading.
set -euo pipefail
archive=$(realpath "$1"); runs=${2:-5}; nodes=${3:-1}
work=$(mktemp -d -p "${TMPDIR:-/tmp}")
export DAYFLY_RUNTIME_DIR=$work
finish() { dayfly down > /dev/null 2>&1 || true; rm -rf "$work"; }
trap finish EXIT
median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
stage() { taskset -c 1 dayfly stage-in --json --replace "$@" /dayfly/other | tail -n 1; }
reader() { taskset -c 0 dayfly exec -- dayfly-bench posix files /dayfly/read "$work/list" --passes "$1"; }

taskset -c 1 dayfly up --local "$nodes" --data-dir "$work" > /dev/null
dayfly stage-in "$archive" /dayfly/read 2> /dev/null
dayfly exec -- sh -c 'cd /dayfly/read && find . -type f' | shuf --random-source=/dev/zero | head -n 20000 > "$work/list" || true
rate=$(stage "$archive" | python3 -c 'import json, sys; last = json.load(sys.stdin); print(int(last["source_bytes"] * 1000 / last["elapsed_ms"] / 2))')
echo "a stage-in reads $((2 * rate / 1000000)) MB/s; it is now limited to $((rate / 1000000)) MB/s"
for _ in $(seq "$runs"); do
    reader 3 >> "$work/alone"
    stage --max-rate "$rate" "$archive" "$archive" > "$work/staged" & staging=$!
    sleep 0.3
    reader 3 >> "$work/beside"
    if ! kill -0 "$staging" 2> /dev/null; then echo "the stage-in ended before the reader; pass a larger archive" >&2; fi
    wait "$staging"
done
alone=$(median < "$work/alone"); beside=$(median < "$work/beside")
echo "$alone $beside" | awk '{ printf "medians, ns per file: alone %d, during the stage-in %d: %.1f %% slower\n", $1, $2, ($2 / $1 - 1) * 100 }'
