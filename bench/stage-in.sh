#!/usr/bin/env bash
# Stage-in beside `tar xf` of the same archive, each on a fresh ext4 (a loop device), the page cache dropped before each run.
# Usage, as root: bench/stage-in.sh ARCHIVE [RUNS] [NODES]; dayfly must be in PATH.
set -euo pipefail
archive=$(realpath "$1"); runs=${2:-5}; nodes=${3:-4}
work=$(mktemp -d); image=$work/image; mountpoint=$work/mnt
mkdir "$mountpoint"
finish() { mountpoint -q "$mountpoint" && umount "$mountpoint"; rm -rf "$work"; }
trap finish EXIT

fresh() {
    mountpoint -q "$mountpoint" && umount "$mountpoint"
    rm -f "$image"; truncate -s 20G "$image"
    mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 "$image"
    mount -o loop "$image" "$mountpoint"
    sync; echo 3 > /proc/sys/vm/drop_caches
}
cold() { # Proof: none of the archive's pages are resident before the run.
    fincore -nb -o RES "$archive" 2>/dev/null | tr -d ' ' || echo unknown
}
seconds() { local start end; start=$(date +%s.%N); "$@" > "$work/log" 2>&1; end=$(date +%s.%N); echo "$end - $start" | bc; }
median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }

for run in $(seq "$runs"); do
    fresh; resident=$(cold); mkdir "$mountpoint/out"
    tar_s=$(seconds tar xf "$archive" -C "$mountpoint/out"); sync_s=$(seconds sync)
    fresh
    export DAYFLY_RUNTIME_DIR=$work
    dayfly up --local "$nodes" --data-dir "$mountpoint" > /dev/null
    stage_s=$(seconds dayfly stage-in --json "$archive" /dayfly/bench); cp "$work/log" "$work/stage.log"
    stage_sync_s=$(seconds sync)
    dayfly down > /dev/null
    echo "run $run: tar $tar_s s (+ sync $sync_s), stage-in $stage_s s (+ sync $stage_sync_s), $resident bytes of the archive resident before"
    echo "$tar_s" >> "$work/tar"; echo "$stage_s" >> "$work/stage"
done
tar_m=$(median < "$work/tar"); stage_m=$(median < "$work/stage")
samples=$(grep -o '"samples":[0-9]*' "$work/stage.log" | cut -d: -f2); bytes=$(grep staged-in "$work/stage.log" | grep -o '"bytes":[0-9]*' | cut -d: -f2)
rate() { awk -v s="$1" -v n="$samples" -v b="$bytes" 'BEGIN { printf "%.0f files/s, %.0f MB/s", n / s, b / s / 1e6 }'; }
echo "medians of $runs, cold: tar xf $tar_m s ($(rate "$tar_m")); stage-in on $nodes servers $stage_m s ($(rate "$stage_m"))"
