#!/usr/bin/env bash
# Measures how much serving other nodes slows a local reader. The reader runs on one core, all servers on another.
# Usage: bench/fairness.sh [RUNS]
# Needs root, two cores, and dayfly and dayfly-bench (builds of the profile dist) in PATH. DAYFLY_BENCH_DIR keeps the dataset.
set -euo pipefail
runs=${1:-5}
here=$(cd "$(dirname "$0")" && pwd)
sets=${DAYFLY_BENCH_DIR:-$(mktemp -d)}
work=$(mktemp -d)
trap 'rm -rf "$work"; [ -n "${DAYFLY_BENCH_DIR:-}" ] || rm -rf "$sets"' EXIT
if ! [ -f "$sets/small.tar" ]; then
    dayfly-bench make "$sets/small" --samples 100000
    tar -C "$sets/small" -cf "$sets/small.tar" . && rm -rf "$sets/small"
fi
DAYFLY_SET=$sets/small.tar DAYFLY_RUNS=$runs taskset -c 1 "$here/namespaces.py" --memory 64MiB "$work/session" bash -euc '
    median() { sort -n | awk "{v[NR]=\$1} END {print v[int((NR+1)/2)]}"; }
    dayfly stage-in "$DAYFLY_SET" /dayfly/set > /dev/null 2>&1
    dayfly tune --cache off > /dev/null
    reader() { taskset -c 0 dayfly-bench read --from local --how one --samples 25000 --passes 20 | cut -d" " -f1; }
    reader > /dev/null
    alone=$(mktemp) beside=$(mktemp)
    for _ in $(seq "$DAYFLY_RUNS"); do
        reader >> "$alone"
        # Node 1 reads all remote samples, including those of node 0, again and again. Its 64 MiB arena holds few of them.
        DAYFLY_NODE=1 dayfly-bench read --node 1 --from remote --samples 75000 --passes 1000 > /dev/null & other=$!
        sleep 0.3
        reader >> "$beside"
        kill $other; wait $other 2> /dev/null || true
    done
    echo "$(median < "$alone") $(median < "$beside")" | awk "{printf \"local 3 KB samples/s: alone %d, while its node serves others %d: %.1f %% slower\n\", \$1, \$2, (1 - \$2 / \$1) * 100}"'
