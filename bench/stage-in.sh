#!/usr/bin/env bash
# Compares stage-ins with the tools that unpack an archive on one machine. Each run has a fresh ext4 on a loop device, and nothing
# is deleted between runs. Archives are read cold: caches are dropped before each run, and the pages of the archive that are
# still in memory are counted.
# A stage-in ends only when the drives have the data. The rows `synced` and `drive` therefore compare it with `tar xf && sync` and with
# the drive's own rate of sequential writing. In the row `drive` the archive is in memory (/dev/shm), so the drive only writes.
# Usage: bench/stage-in.sh [RUNS] [NODES] [ROW...]     rows: synced drive small large zst gz zip many (default: all)
# Needs root, dayfly and dayfly-bench in PATH, e2fsprogs, util-linux, python3, tar, zip, unzip, zstd and pigz.
# DAYFLY_BENCH_DIR keeps the datasets.
set -euo pipefail
runs=${1:-5}; nodes=${2:-4}; rows=${*:3}; rows=${rows:-synced drive small large zst gz zip many}
sets=${DAYFLY_BENCH_DIR:-$(mktemp -d)}; work=$(mktemp -d); image=$work/image; disk=$work/disk
mkdir -p "$disk" "$sets"
memory=/dev/shm/dayfly-bench-$$
finish() { ! mountpoint -q "$disk" || umount "$disk"; rm -rf "$work" "$memory"; [ -n "${DAYFLY_BENCH_DIR:-}" ] || rm -rf "$sets"; }
trap finish EXIT
export DAYFLY_RUNTIME_DIR=$work

tree() { [ -d "$sets/$1" ] || dayfly-bench make "$sets/$1" "${@:2}"; }
archive() { # NAME COMMAND...: creates an archive unless it exists
    [ -e "$sets/$1" ] || { "${@:2}" > "$sets/.making" && mv "$sets/.making" "$sets/$1"; }
}
fresh() {
    ! mountpoint -q "$disk" || umount "$disk"
    rm -f "$image"; truncate -s 24G "$image"
    mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 "$image"
    mount -o loop "$image" "$disk"
    sync; echo 3 > /proc/sys/vm/drop_caches
}
resident() { local sum=0 file; for file in "$@"; do sum=$((sum + $(fincore -nb -o RES "$file"))); done; echo $sum; }
seconds() { local start end; start=$(date +%s%N); "$@" > "$work/log" 2>&1; end=$(date +%s%N); echo "$start $end" | awk '{ print ($2 - $1) / 1e9 }'; }
median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
stage() { # TARGET SOURCES...: starts a session, prints the seconds that a stage-in takes in it, and ends the session
    # The stage-in's last line of JSON goes to $work/json.
    dayfly up --local "$nodes" --data-dir "$disk" > /dev/null
    seconds dayfly stage-in --json "${@:2}" "$1"
    tail -n 1 "$work/log" >> "$work/json"
    dayfly down > /dev/null
}
compare() { # TITLE SOURCES_GLOB TOOL...: runs the tool in a shell on the disk, and a stage-in of the same sources
    local title=$1 sources; sources=$(compgen -G "$2"); shift 2
    rm -f "$work"/{tool,stage,cold,json}
    for _ in $(seq "$runs"); do
        fresh; resident $sources >> "$work/cold"; (cd "$disk" && seconds bash -c "$*") >> "$work/tool"
        fresh; resident $sources >> "$work/cold"; stage /dayfly/bench $sources >> "$work/stage"
    done
    python3 - "$title" "$(median < "$work/tool")" "$(median < "$work/stage")" "$(sort -n "$work/cold" | tail -n 1)" "$work/json" << 'PYTHON'
import json, sys
title, tool, stage, resident, path = sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5]
last = [json.loads(line) for line in open(path)][-1]
shipped = sum(node["shipped_bytes"] for node in last["nodes"])
busy = {step: sum(node["busy_ms"][step] for node in last["nodes"]) for step in last["nodes"][0]["busy_ms"]}
print(f"{title}: {tool:.2f} s, stage-in {stage:.2f} s: {tool / stage:.2f} times as fast; {last['samples'] / stage:,.0f} files/s, "
      f"{last['bytes'] / stage / 1e6:.0f} MB/s; shipped {shipped / 1e6:.0f} MB, redone {last['redone_bytes']}, busy {busy} ms, "
      f"{resident} bytes of the sources in memory before", flush=True)
PYTHON
}

durable() { # TITLE TAR: compares a stage-in with tar, with and without a sync, and with one file that is written sequentially and synced
    local title=$1 tar=$2 tool
    rm -f "$work"/{json,time-*}
    for _ in $(seq "$runs"); do
        for tool in "tar xf $tar" "tar xf $tar && sync -f ." "dd if=$tar of=file bs=4M conv=fdatasync"; do
            # dd measures only the drive's writing, so it reads the archive from memory.
            fresh; [ "${tool%% *}" = tar ] || cat "$tar" > /dev/null
            (cd "$disk" && seconds bash -c "$tool") >> "$work/time-$(tr -dc a-z <<< "${tool//$tar/}")"
        done
        fresh; stage /dayfly/bench "$tar" >> "$work/time-stage"
    done
    local plain synced written stage
    plain=$(median < "$work/time-tarxf"); synced=$(median < "$work/time-tarxfsyncf")
    written=$(median < "$work"/time-dd*); stage=$(median < "$work/time-stage")
    awk -v title="$title" -v plain="$plain" -v synced="$synced" -v written="$written" -v stage="$stage" -v bytes="$(stat -c %s "$tar")" 'BEGIN {
        printf "%s: tar xf %.2f s, tar xf && sync %.2f s, written sequentially and synced %.2f s (%.0f MB/s), stage-in %.2f s (%.0f MB/s): ",
            title, plain, synced, written, bytes / written / 1e6, stage, bytes / stage / 1e6
        printf "%.2f times as fast as tar xf && sync, %.2f times tar xf, %.2f of the drive'"'"'s rate\n", synced / stage, plain / stage, written / stage }'
}

for row in $rows; do case $row in
synced)
    tree t3k --samples 50000 --mean-size 3000; archive 3k.tar tar cf - -C "$sets/t3k" .
    durable "plain tar, 50,000 x 3 KB, cold" "$sets/3k.tar"
    tree t110k --samples 20000 --mean-size 110000; archive 110k.tar tar cf - -C "$sets/t110k" .
    durable "plain tar, 20,000 x 110 KB, cold" "$sets/110k.tar" ;;
drive)
    tree t110k --samples 20000 --mean-size 110000; archive 110k.tar tar cf - -C "$sets/t110k" .
    mkdir -p "$memory"; cp "$sets/110k.tar" "$memory/110k.tar"
    durable "plain tar, 20,000 x 110 KB, read from memory" "$memory/110k.tar"
    rm -r "$memory" ;;
small)
    tree t3k --samples 50000 --mean-size 3000; archive 3k.tar tar cf - -C "$sets/t3k" .
    compare "plain tar, 50,000 x 3 KB, tar xf" "$sets/3k.tar" tar xf "$sets/3k.tar" ;;
large)
    tree t110k --samples 20000 --mean-size 110000; archive 110k.tar tar cf - -C "$sets/t110k" .
    compare "plain tar, 20,000 x 110 KB, tar xf" "$sets/110k.tar" tar xf "$sets/110k.tar"
    compare "plain tar, 20,000 x 110 KB, cp of the archive" "$sets/110k.tar" cp "$sets/110k.tar" . ;;
zst | gz)
    tool="zstd -q"; [ "$row" = zst ] || tool="pigz"
    for size in 3k 110k; do
        case $size in 3k) tree t3k --samples 50000 --mean-size 3000 ;; *) tree t110k --samples 20000 --mean-size 110000 ;; esac
        archive $size.tar tar cf - -C "$sets/t$size" .; archive $size.tar.$row $tool -c "$sets/$size.tar"
        compare "tar.$row, $size, $tool -dc > /dev/null" "$sets/$size.tar.$row" "$tool -dc $sets/$size.tar.$row > /dev/null"
        compare "tar.$row, $size, the disk (cp of the plain tar)" "$sets/$size.tar.$row" cp "$sets/$size.tar" .
    done ;;
zip)
    tree t3k --samples 50000 --mean-size 3000
    [ -e "$sets/3k.zip" ] || (cd "$sets/t3k" && zip -q -0 -r "$sets/3k.zip" .)
    compare "zip, stored, 50,000 x 3 KB, unzip" "$sets/3k.zip" unzip -q "$sets/3k.zip" ;;
many)
    mkdir -p "$sets/many"
    [ -e "$sets/many/99.tar" ] || python3 - "$sets/many" << 'PYTHON'
import io, sys, tarfile
for number in range(100):
    with tarfile.open(f"{sys.argv[1]}/{number:02}.tar", "w") as tar:
        for file in range(10_000):
            info = tarfile.TarInfo(f"{number:02}/{file}.txt")
            info.size = len(text := b"%d\n" % file)
            tar.addfile(info, io.BytesIO(text))
PYTHON
    compare "1,000,000 files of a few bytes in 100 tars, tar xf of all" "$sets/many/*.tar" "for t in $sets/many/*.tar; do tar xf \$t; done" ;;
*) echo "unknown row '$row'" >&2; exit 2 ;;
esac; done
