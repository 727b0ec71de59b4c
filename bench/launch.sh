#!/usr/bin/env bash
# Measures how long `dayfly up` and `dayfly down` take with 2, 16 and 64 servers on this machine: medians of RUNS (5).
# It measures `--local`, which starts each server directly, and then `ssh` along the tree, with a shell script that
# stands in for ssh. The time of a workload manager's own launcher is not included.
# Usage: bench/launch.sh [RUNS]
# Needs dayfly in PATH.
set -euo pipefail
runs=${1:-5}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export DAYFLY_RUNTIME_DIR=$work TMPDIR=$work
mkdir "$work/bin"
# A stand-in for `ssh OPTIONS... HOST PROGRAM...` that runs the program on this machine.
printf '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift 2; done\nshift\nexec sh -c "DAYFLY_RUNTIME_DIR=%s $*"\n' "$work" > "$work/bin/ssh"; chmod 755 "$work/bin/ssh"
median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
ms() { local start; start=$(date +%s%N); "$@" > /dev/null; echo $((($(date +%s%N) - start) / 1000000)); }
printf '%-8s %8s %10s %10s\n' launcher servers "up ms" "down ms"
for servers in 2 16 64; do
    for how in local ssh; do
        options=(--local "$servers")
        # Real machines run one server each. Here all servers share one machine, so each gets a
        # small capacity.
        [ "$how" = local ] || options=(--hosts "h[1-$servers]" --capacity 16MiB)
        : > "$work/up"; : > "$work/down"
        for _ in $(seq "$runs"); do
            PATH=$work/bin:$PATH ms dayfly up --memory 32MiB "${options[@]}" >> "$work/up"
            ms dayfly down >> "$work/down"
        done
        printf '%-8s %8s %10s %10s\n' "$how" "$servers" "$(median < "$work/up")" "$(median < "$work/down")"
    done
done
