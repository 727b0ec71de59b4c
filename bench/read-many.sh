#!/usr/bin/env bash
# Compares dayfly_read_many and dayfly_read_many_ids with open, read and close through the preload library, for files that are on
# the node, of 3 KB and of 30 KB. All are measured in turn, in one run. The page cache is warm.
# Usage: bench/read-many.sh [RUNS [BATCH]]
# Needs dayfly, dayfly-bench and gcc in PATH.
set -euo pipefail
runs=${1:-5}; batch=${2:-256}
library=$(dirname "$(find "$(dirname "$(command -v dayfly)")" -maxdepth 2 -name libdayfly_preload.so | head -1)")
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
export DAYFLY_RUNTIME_DIR=$work
finish() { dayfly down > /dev/null 2>&1 || true; rm -rf "$work"; }
trap finish EXIT
gcc -O2 -Wall -I "$here/../client/preload/include" -o "$work/read_many" "$here/read_many.c" -L "$library" -ldayfly_preload -Wl,-rpath,"$library"
dayfly-bench make "$work/3K" --samples 50000 --mean-size 3000
dayfly-bench make "$work/30K" --samples 10000 --mean-size 30000
mkdir "$work/data"
dayfly up --local 1 --data-dir "$work/data" > /dev/null
for set in 3K 30K; do
    dayfly stage-in "$work/$set" "/dayfly/$set" 2> /dev/null
    echo "== $set"
    dayfly exec -- "$work/read_many" "/dayfly/$set" "$runs" "$batch"
done
