#!/usr/bin/env bash
# How long `up` and `down` take. Usage: bench/session.sh [NODES] [RUNS]; dayfly must be in PATH.
set -euo pipefail
nodes=${1:-4}; runs=${2:-5}
median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
export DAYFLY_RUNTIME_DIR=$work
seconds() { local start end; start=$(date +%s.%N); "$@" > /dev/null; end=$(date +%s.%N); echo "$end - $start" | bc; }
for _ in $(seq "$runs"); do
    seconds dayfly up --local "$nodes" >> "$work/up"
    seconds dayfly down >> "$work/down"
done
echo "medians of $runs: up --local $nodes $(median < "$work/up") s, down $(median < "$work/down") s"
