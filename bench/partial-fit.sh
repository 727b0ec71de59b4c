#!/usr/bin/env bash
# Measures shuffled epochs over a dataset of which 60 % fit, on a slow parallel file system that counts what is read from it.
# Usage: bench/partial-fit.sh [EPOCHS]
# Needs root, /dev/fuse, and dayfly, dayfly-bench (builds of the profile dist), python3 in PATH. DAYFLY_BENCH_DIR keeps the datasets.
#
# In each epoch, side by side, in the same shuffled order:
#   p      the parallel file system alone: the same reads of the same records, by as many threads as the servers have streams
#   l      a session in which everything fits
#   mixed  a session in which about 60 % fit
# With s the share that is stored, no reader can be faster than min(p / (1 - s), l / s): both parts take their time, at best at once.
# The goal is 0.9 of that. What is read from the parallel file system is counted by the file system itself (direct I/O, so each
# read call counts), and compared with the servers' own counters. Caches: the tar is in the page cache below the file system, whose
# rate and delay are then what they are set to; nothing that is not stored can be in an arena from an earlier epoch, but for the
# arenas' size, which is a small part of the dataset.
set -euo pipefail
epochs=${1:-5}
sets=${DAYFLY_BENCH_DIR:-$(mktemp -d)}
work=$(mktemp -d)
mkdir "$work/mnt"
pfs=
cleanup() {
    for session in ${all_fits:-} ${mixed:-}; do DAYFLY_SESSION=$session dayfly down >/dev/null 2>&1 || true; done
    [ -z "$pfs" ] || { kill "$pfs"; wait "$pfs" || true; }
    rm -rf "$work"; [ -n "${DAYFLY_BENCH_DIR:-}" ] || rm -rf "$sets"
}
trap cleanup EXIT
median() { sort -n | awk '{v[NR]=$1} END {print v[int((NR+1)/2)]}'; }
pfs_count() { # READS_OR_BYTES
    rm -f "$work/counts"; kill -USR1 "$pfs"; until [ -f "$work/counts" ]; do sleep 0.05; done
    python3 -c "import json,sys; print(json.load(open('$work/counts'))['$1'])"
}
servers_count() { dayfly status --json | python3 -c "import json,sys; print(sum(node['origins']['$1'] for node in json.load(sys.stdin)['nodes']))"; }

row() { # NAME SAMPLES RATE DELAY_MS STREAMS BATCH OPTIONS_OF_MAKE...
    local name=$1 samples=$2 rate=$3 delay=$4 streams=$5 batch=$6; shift 6
    if [ ! -f "$sets/$name.tar" ]; then
        dayfly-bench make "$sets/$name" --samples "$samples" "$@"
        tar -C "$sets/$name" -cf "$sets/$name.tar" . && rm -rf "${sets:?}/$name"
    fi
    dayfly-bench pfs "$sets" "$work/mnt" --rate "$rate" --delay-ms "$delay" --counts "$work/counts" & pfs=$!
    until mountpoint -q "$work/mnt"; do kill -0 "$pfs"; sleep 0.1; done
    all_fits=$(dayfly up --local 4 --memory 64MiB --data-dir "$sets")
    DAYFLY_SESSION=$all_fits dayfly stage-in --json "$work/mnt/$name.tar" /dayfly/set > "$work/all"
    DAYFLY_SESSION=$all_fits dayfly tune --cache off > /dev/null
    local bytes capacity
    bytes=$(grep staged-in "$work/all" | python3 -c "import json,sys; print(json.loads(sys.stdin.read())['bytes'])")
    # Besides samples, a node stores the catalog, for which it reserves up to 256 bytes a sample.
    capacity=$((bytes * 6 / 10 / 4 + samples * 256 + 1000000))
    mixed=$(dayfly up --local 4 --memory 64MiB --capacity "${capacity}B" --pfs-streams "$streams" --data-dir "$sets")
    DAYFLY_SESSION=$mixed dayfly stage-in --json "$work/mnt/$name.tar" /dayfly/set > "$work/mixed"
    export DAYFLY_SESSION
    local unstored epoch before reads_before servers_before
    unstored=$(grep staged-in "$work/mixed" | python3 -c "import json,sys; print(json.loads(sys.stdin.read())['unstored_bytes'])")
    : > "$work/p"; : > "$work/l"; : > "$work/m"; : > "$work/b"; : > "$work/o"
    for epoch in $(seq "$epochs"); do
        DAYFLY_SESSION=$all_fits
        dayfly-bench read --how origins --threads $((4 * streams)) --from any --samples "$samples" --epoch "$epoch" | cut -d' ' -f2 >> "$work/p"
        dayfly-bench read --submit --batch "$batch" --from any --samples "$samples" --epoch "$epoch" | cut -d' ' -f2 >> "$work/l"
        DAYFLY_SESSION=$mixed
        before=$(pfs_count bytes); reads_before=$(pfs_count reads); servers_before=$(servers_count bytes)
        dayfly-bench read --submit --batch "$batch" --from any --samples "$samples" --epoch "$epoch" | cut -d' ' -f2 >> "$work/m"
        echo $(($(pfs_count bytes) - before)) >> "$work/b"; echo $(($(pfs_count reads) - reads_before)) >> "$work/o"
        [ $(($(servers_count bytes) - servers_before)) -le "$(tail -1 "$work/b")" ] || echo "the servers count more than the file system"
    done
    dayfly status --json > "$work/status"
    python3 - "$name" "$samples" "$bytes" "$unstored" "$work" << 'END'
import sys
name, samples, bytes, unstored, work = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
values = {key: sorted(float(line) for line in open(f"{work}/{key}")) for key in "plmbo"}
p, l, m, b, o = (values[key][len(values[key]) // 2] for key in "plmbo")
s = 1 - unstored / bytes
best = min(p / (1 - s), l / s)
print(f"{name}: {samples} samples, {bytes / 1e6:.0f} MB, {s * 100:.1f} % stored")
print(f"  p {p / 1e6:.0f} MB/s, l {l / 1e6:.0f} MB/s, mixed {m / 1e6:.0f} MB/s: {m / best:.2f} of min(p/{1 - s:.2f}, l/{s:.2f}) = {best / 1e6:.0f} MB/s")
print(f"  per epoch at the file system: {b / unstored:.4f} x the bytes that are not stored (largest {values['b'][-1] / unstored:.4f}), "
      f"{o / samples / (1 - s):.3f} operations a sample that is not stored")
END
    for session in $all_fits $mixed; do DAYFLY_SESSION=$session dayfly down > /dev/null; done
    unset DAYFLY_SESSION; all_fits=; mixed=
    kill "$pfs"; wait "$pfs" || true; pfs=
}
uptime
row large 20000 200000000 5 16 64 --mean-size 100000 --log-normal 0.5
row small 200000 200000000 5 16 256 --mean-size 3000
