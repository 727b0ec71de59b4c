#!/usr/bin/env bash
# Measures what readers notice when nodes of their session fail. METHOD.md says what the rows mean.
# Usage: bench/node-loss.sh [--runs N] [--no-goals] [ROW...]
#   rows: killed copies silent link-3 link-5 link-20 stop-8 stop-20 hang-60 cut-off power-loss ft-hvac (default: all)
# Prints one table. The exit status is 1 if a goal was missed, unless --no-goals is given.
# Needs root, /dev/fuse, and dayfly, dayfly-bench (builds of the profile dist), e2fsprogs, iproute2, util-linux and python3 in PATH.
# DAYFLY_BENCH_DIR keeps the dataset, and DAYFLY_BENCH_LOG the messages of all programs.
#
# Each session has four servers in network namespaces on a fresh ext4, and readers on three of them, which compare every byte. The
# sources are on a file system that stands for a parallel one, and counts what is read from it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
runs=5; goals=
while [ $# -gt 0 ]; do case $1 in
    --runs) runs=$2; shift 2 ;;
    --no-goals) goals=--no-goals; shift ;;
    -*) echo "unknown option '$1'" >&2; exit 2 ;;
    *) break ;;
esac; done
all="killed copies silent link-3 link-5 link-20 stop-8 stop-20 hang-60 cut-off power-loss ft-hvac"
for row in "$@"; do case " $all " in *" $row "*) ;; *) echo "unknown row '$row'; rows: $all" >&2; exit 2 ;; esac; done
rows=${*:-$all}
samples=10000 sizes="--mean-size 100000 --log-normal 0.5"
sets=${DAYFLY_BENCH_DIR:-$(mktemp -d)}
work=$(mktemp -d); image=$work/image; disk=$work/disk
log=${DAYFLY_BENCH_LOG:-$work/log}; : > "$log"
mkdir -p "$sets" "$work/mnt" "$disk"
pfs=
finish() {
    ! mountpoint -q "$disk" || umount "$disk"
    [ -z "$pfs" ] || { kill "$pfs"; wait "$pfs" || true; }
    rm -rf "$work"; [ -n "${DAYFLY_BENCH_DIR:-}" ] || rm -rf "$sets"
}
trap finish EXIT

set=node-loss-$samples.tar
if [ ! -f "$sets/$set" ]; then
    # shellcheck disable=SC2086
    dayfly-bench make "$work/tree" --samples $samples $sizes
    tar -C "$work/tree" -cf "$sets/.making" . && mv "$sets/.making" "$sets/$set" && rm -rf "$work/tree"
fi
# 500 MB/s for all nodes together, and 2 ms for each operation.
dayfly-bench pfs "$sets" "$work/mnt" --rate 500000000 --delay-ms 2 --counts "$work/counts" & pfs=$!
until mountpoint -q "$work/mnt"; do kill -0 "$pfs"; sleep 0.1; done

fresh() {
    ! mountpoint -q "$disk" || umount "$disk"
    rm -f "$image"; truncate -s 16G "$image"
    mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 "$image"
    mount -o loop "$image" "$disk"
    sync; echo 3 > /proc/sys/vm/drop_caches
}
session() { # ROW PART CASE NODES OPTIONS_OF_NAMESPACES...: measures one case in a new session
    fresh
    echo "--- $1, $2" >> "$log"
    NODE_LOSS_ROW=$1 NODE_LOSS_PART=$2 NODE_LOSS_SET=$work/mnt/$set NODE_LOSS_BYTES=$(stat -c %s "$sets/$set") NODE_LOSS_SIZES=$sizes \
        NODE_LOSS_PFS=$pfs NODE_LOSS_COUNTS=$work/counts NODE_LOSS_RUNS=$runs \
        "$here/namespaces.py" --outside --nodes "$4" --memory 128MiB --capacity 2GiB --up=--no-rejoin "${@:5}" "$disk/session" "$here/node_loss.py" "$3" \
        >> "$work/results" 2>> "$log" && return
    echo "{\"row\": \"$1\", \"part\": \"$2\", \"errors\": 1}" >> "$work/results"
    echo "$1, $2: the session failed; the last messages:" >&2
    tail -n 20 "$log" >&2
}
times() { local run; for run in $(seq "$runs"); do "$@"; done; }
beside_three() { session "$1" three "$2" 3; session "$1" four "$3" 4; }
beside_both() { session copies plain reference 3; beside_three copies reference-copies killed-copies; }
hvac() {
    session ft-hvac none hvac-none 6
    session ft-hvac losses hvac-losses 6
    session ft-hvac first-touch hvac-losses 6 --up=--recovery-rate=0
}

: > "$work/results"
uptime
for row in $rows; do case $row in
    killed) times beside_three killed reference killed ;;
    copies) times beside_both ;;
    silent | cut-off | power-loss) times session "$row" "$row" "$row" 4 ;;
    # One session for all runs, because all is as before after each.
    link-* | stop-* | hang-*) session "$row" "$row" "$row" 4 ;;
    ft-hvac) times hvac ;;
esac; done
{ echo "--- all results"; cat "$work/results"; } >> "$log"
"$here/node_loss_table.py" $goals "$work/results"
