#!/usr/bin/env bash
# Compares the preload library with a fresh ext4 file system (on a loop device) that contains the same files. The two are measured
# in turn, and the table shows the medians of RUNS runs. The page cache is warm unless a row says cold.
# Usage: bench/posix.sh [RUNS] [ENTRIES]
# Needs root, and dayfly, dayfly-bench and python3 in PATH.
set -euo pipefail
runs=${1:-5}; entries=${2:-1000000}
work=$(mktemp -d); image=$work/image; mountpoint=$work/mnt
mkdir "$mountpoint"; export DAYFLY_RUNTIME_DIR=$work
finish() { dayfly down > /dev/null 2>&1 || true; umount "$mountpoint" 2> /dev/null || true; rm -rf "$work"; }
trap finish EXIT
truncate -s 30G "$image"
mkfs.ext4 -q -N 4000000 -E lazy_itable_init=0,lazy_journal_init=0 "$image"
mount -o loop,noatime "$image" "$mountpoint"
plain=$mountpoint/plain; mkdir "$plain"

median() { sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; }
drop() { sync; echo 3 > /proc/sys/vm/drop_caches; }
# Runs COMMAND over ext4 and over the namespace in turn, with ROOT replaced by the root of each. Prints both medians and their ratio.
row() { # NAME BEFORE COMMAND...
    local name=$1 before=$2; shift 2
    : > "$work/a"; : > "$work/b"
    for _ in $(seq "$runs"); do
        $before; "${@//ROOT/$plain}" >> "$work/a"
        $before; dayfly exec -- "${@//ROOT//dayfly}" >> "$work/b"
    done
    local a b; a=$(median < "$work/a"); b=$(median < "$work/b")
    awk -v name="$name" -v a="$a" -v b="$b" 'BEGIN { printf "| %-58s | %12.0f | %12.0f | %6.2f |\n", name, a, b, a / b }'
}
seconds() { python3 - "$@" <<'P'
import subprocess, sys, time
start = time.perf_counter(); subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True); print(round((time.perf_counter() - start) * 1e9))
P
}
export -f seconds
lists() { (cd "$plain/$1" && find . -type f -printf '%P\n' | shuf --random-source=<(yes) > "$work/$1.list"); }

dayfly-bench make "$plain/small" --samples 100000 --mean-size 3000
dayfly-bench make "$plain/large" --samples 10000 --mean-size 110000 --log-normal 0.5
dayfly up --data-dir "$mountpoint" > /dev/null
for set in small large; do dayfly stage-in "$plain/$set" "/dayfly/$set" 2> /dev/null; lists "$set"; cat $(find "$plain/$set" -type f | head -1) > /dev/null; done
find "$plain" -type f -print0 | xargs -0 cat > /dev/null; dayfly verify > /dev/null

echo "ns per file, medians of $runs; ratio = ext4 / dayfly"
printf '| %-58s | %12s | %12s | %6s |\n|---|---:|---:|---:|\n' work ext4 dayfly ratio
row "open+fstat+read+close, 3 KB, third pass" : dayfly-bench posix files ROOT/small "$work/small.list" --passes 3
row "the same, first pass of the process" : dayfly-bench posix files ROOT/small "$work/small.list" --passes 1
row "110 KB, third pass" : dayfly-bench posix files ROOT/large "$work/large.list" --passes 3
row "the same, second pass" : dayfly-bench posix files ROOT/large "$work/large.list" --passes 2
row "the same, first pass of the process" : dayfly-bench posix files ROOT/large "$work/large.list" --passes 1
row "stat of every path, 3 KB set" : dayfly-bench posix stat ROOT/small "$work/small.list"
python='import sys,time
root, paths = sys.argv[1], open(sys.argv[2]).read().split()
paths = [root + "/" + path for path in paths]
for _ in range(2):
    start = time.perf_counter()
    for path in paths:
        with open(path, "rb") as file: file.read()
print(round((time.perf_counter() - start) / len(paths) * 1e9))'
row "Python open(p,'rb').read(), 3 KB" : python3 -c "$python" ROOT/small "$work/small.list"
for threads in 1 16; do
    row "cold, 3 KB, $threads readers" drop dayfly-bench posix files ROOT/small "$work/small.list" --passes 1 --threads $threads
    row "cold, 110 KB, $threads readers" drop dayfly-bench posix files ROOT/large "$work/large.list" --passes 1 --threads $threads
done
head -1 "$work/small.list" > "$work/one.list"
row "attach: first stat in a process (ns)" : dayfly-bench posix attach ROOT/small "$work/one.list"
find /usr/bin -type f -printf '%P\n' | sed -n 1,500p > "$work/outside.list"
outside() { if [ "$1" = plain ]; then "${@:2}"; else dayfly exec -- "${@:2}"; fi; }
: > "$work/a"; : > "$work/b"
for _ in $(seq "$runs"); do for side in plain ours; do
    outside $side dayfly-bench posix stat /usr/bin "$work/outside.list" --passes 200 --best >> "$work/$([ $side = plain ] && echo a || echo b)"
done; done
printf '| %-58s | %12s | %12s |        |\n' "stat outside the prefix, best of 200 passes" "$(median < "$work/a")" "$(median < "$work/b")"
dayfly down > /dev/null

# With two nodes, this measures reads of samples that the other node holds. Another dataset is read first, so that the arena's
# memory has already been touched, as it would be a few seconds into a job. Every measured sample is requested for the first time
# in its session.
dayfly-bench make "$plain/other" --samples 4000 --mean-size 110000 --log-normal 0.5
for set in small large; do
    mean=$(find "$plain/$set" -type f -printf '%s\n' | awk '{ s += $1 } END { printf "%d", s / NR }')
    : > "$work/a"; : > "$work/b"
    for _ in $(seq "$runs"); do
        dayfly up --local 2 --memory 128MiB --data-dir "$mountpoint" > /dev/null
        for one in $set other; do dayfly stage-in "$plain/$one" "/dayfly/$one" 2> /dev/null; done
        # Lists samples whose only block is on the other node.
        sed -n "1,4000s|^|/dayfly/$set/|p" "$work/$set.list" | xargs -n 500 dayfly stat \
            | awk '/File:/ { path = $2 } /Block: .* on node 1$/ { print path }' | sed "s|^/dayfly/$set/||" | sed -n 1,1000p > "$work/far.list"
        dayfly exec --node 1 -- bash -c "find /dayfly/$set -type f -print0 | xargs -0 cat > /dev/null"
        dayfly exec --node 0 -- bash -c 'find /dayfly/other -type f -print0 | xargs -0 cat > /dev/null'
        dayfly-bench ping-pong "$mean" >> "$work/a"
        dayfly exec --node 0 -- dayfly-bench posix files /dayfly/$set "$work/far.list" --passes 1 >> "$work/b"
        dayfly down > /dev/null
    done
    a=$(median < "$work/a"); b=$(median < "$work/b")
    name="$(wc -l < "$work/far.list") $set samples of the other node, one at a time"
    awk -v name="$name" -v a="$a" -v b="$b" 'BEGIN { printf "| %-58s | %12.0f | %12.0f | %6.2f |\n", name ": ping-pong; dayfly; ratio", a, b, b / a }'
done

# Listings of many entries.
rm -rf "$plain/small" "$plain/large" "$plain/other"
dayfly-bench make "$plain/many" --samples "$entries" --mean-size 20
dayfly up --data-dir "$mountpoint" > /dev/null; dayfly stage-in "$plain/many" /dayfly/many 2> /dev/null
lists many; find "$plain/many" -ls > /dev/null
row "find of $entries entries (ns in total)" : bash -c 'seconds find ROOT/many'
row "find -size of $entries entries (ns in total)" : bash -c 'seconds find ROOT/many -size +1M'
row "os.walk of $entries entries (ns in total)" : bash -c 'seconds python3 -c "import os; print(sum(len(f) for _, _, f in os.walk(\"ROOT/many\")))"'
row "stat of every path of $entries, in random order" : dayfly-bench posix stat ROOT/many "$work/many.list"
sort "$work/many.list" > "$work/sorted.list"
row "the same, in the order of a listing" : dayfly-bench posix stat ROOT/many "$work/sorted.list"
row "private memory of a reader, $entries samples (bytes)" : dayfly-bench posix memory ROOT/many "$work/many.list" --passes 1
dayfly down > /dev/null
