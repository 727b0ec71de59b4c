#!/usr/bin/env bash
# Plots the prefetch controller on a fast link and on a 400 Mbit/s link, side by side.
# Usage: bench/prefetch.sh > docs/prefetch.svg
# Needs root, and dayfly and dayfly-bench (builds of the profile dist) in PATH. DAYFLY_BENCH_DIR keeps the dataset.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
sets=${DAYFLY_BENCH_DIR:-$(mktemp -d)}
work=$(mktemp -d)
trap 'rm -rf "$work"; [ -n "${DAYFLY_BENCH_DIR:-}" ] || rm -rf "$sets"' EXIT
if ! [ -f "$sets/large.tar" ]; then
    dayfly-bench make "$sets/large" --samples 20000 --mean-size 110000
    tar -C "$sets/large" -cf "$sets/large.tar" . && rm -rf "$sets/large"
fi
watch() { # FILE PACE, then options of namespaces.py
    DAYFLY_SET=$sets/large.tar DAYFLY_OUT=$1 DAYFLY_PACE=$2 "$here/namespaces.py" "${@:3}" "$work/session" bash -euc '
        dayfly stage-in "$DAYFLY_SET" /dayfly/set > /dev/null 2>&1
        dayfly tune --cache off > /dev/null
        dayfly-bench prefetch watch --pace "$DAYFLY_PACE" > "$DAYFLY_OUT"'
}
watch "$work/fast" 300e6
watch "$work/slow" 300e6 --rate 400mbit
dayfly-bench prefetch plot "$work/fast=a reader of 300 MB/s, a faster link" "$work/slow=the same reader, a link of 50 MB/s"
