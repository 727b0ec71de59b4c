#!/usr/bin/env bash
# Measures the Python package. METHOD.md says how.
# Usage: bench/python.sh PYTHON [ROW...]     rows: begin views threads told pickles photos shares accuracy pytorch tensorflow (default: all)
# PYTHON has the package dayfly with torch and numpy; `photos` needs pillow, `accuracy` scikit-learn, and `tensorflow` TensorFlow.
# Needs root, /dev/fuse, and dayfly, dayfly-bench (builds of the profile dist) and fincore in PATH. DAYFLY_BENCH_DIR keeps the datasets,
# DAYFLY_BENCH_RUNS is the number of runs (5), and DAYFLY_BENCH_SMALL=1 takes a tenth of the samples, to try the script.
set -euo pipefail
python=$1; shift
rows=${*:-begin views threads told pickles photos shares accuracy pytorch tensorflow}
runs=${DAYFLY_BENCH_RUNS:-5}
here=$(cd "$(dirname "$0")" && pwd)
sets=${DAYFLY_BENCH_DIR:-$(mktemp -d)}
work=$(mktemp -d)
mkdir "$work/mnt" "$work/drive"
small=${DAYFLY_BENCH_SMALL:+1}
samples=$((small ? 2000 : 20000)) photos=$((small ? 400 : 4000)) set=python-$((small ? 2000 : 20000))
export TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=
pfs=
finish() {
    dayfly down > /dev/null 2>&1 || true
    ! mountpoint -q "$work/tmpfs" || umount "$work/tmpfs"
    [ -z "$pfs" ] || { kill "$pfs"; wait "$pfs" || true; }
    rm -rf "$work"; [ -n "${DAYFLY_BENCH_DIR:-}" ] || rm -rf "$sets"
}
trap finish EXIT

up() { dayfly up --local "$1" --data-dir "$work/drive" --capacity 4GiB --memory 512MiB "${@:2}" > /dev/null; }
show() { printf '  %-58s %s\n' "$@"; }
# Prints the median, the least and the greatest of the numbers that it reads.
median() { sort -g | awk '{v[NR] = $1} END {printf "%.4g (%.4g to %.4g)", NR % 2 ? v[(NR + 1) / 2] : (v[NR / 2] + v[NR / 2 + 1]) / 2, v[1], v[NR]}'; }
make_set() { # of 110 KB a sample, as a tar and as a tree
    [ -d "$sets/$set" ] || { dayfly-bench make "$sets/making" --samples $samples --mean-size 110000; mv "$sets/making" "$sets/$set"; }
}

begin() { # how long a program waits before its first sample
    dayfly-bench make "$work/many" --samples $((small ? 20000 : 1280000)) --empty-in-tars 20
    up 1; dayfly stage-in "$work"/many/*.tar /dayfly/many 2> /dev/null; rm -rf "$work/many"
    for _ in $(seq "$runs"); do
        "$python" -c 'import time; start = time.monotonic(); import dayfly; print((time.monotonic() - start) * 1000)' >> "$work/import"
        "$python" "$here/python/items.py" begin /dayfly/many >> "$work/begin"
    done
    dayfly down > /dev/null
    show "import dayfly, ms" "$(median < "$work/import")"
    show "Samples of 1,280,000 files: length and first item, ms" "$(median < "$work/begin")"
}

threads() {
    make_set; up 1; dayfly stage-in "$sets/$set" /dayfly/set 2> /dev/null
    for _ in $(seq "$runs"); do "$python" "$here/python/items.py" threads /dayfly/set; done > "$work/threads"
    dayfly down > /dev/null
    show "samples of 110 KB by 4 threads, per second" "$(cut -d' ' -f1 "$work/threads" | median)"
    show "the same by 4 forked workers" "$(cut -d' ' -f2 "$work/threads" | median)"
}

told() { # the first epoch, with samples of other nodes only
    dayfly-bench make "$work/small" --samples $((small ? 4000 : 40000)) --mean-size 3000
    for way in process open items; do
        for _ in $(seq "$runs"); do
            up 2; dayfly stage-in "$work/small" /dayfly/small 2> /dev/null
            DAYFLY_NODE=0 dayfly exec -- "$python" "$here/python/items.py" told /dayfly/small $way
            dayfly down > /dev/null
        done > "$work/told"
        show "remote samples of 3 KB, order told, $way, per second" "$(median < "$work/told")"
    done
    rm -rf "$work/small"
}

views() {
    make_set; up 1; dayfly stage-in "$sets/$set" /dayfly/set 2> /dev/null
    for _ in $(seq "$runs"); do "$python" "$here/python/items.py" views /dayfly/set; done > "$work/views"
    dayfly down > /dev/null
    show "views of 110 KB in one process, per second" "$(median < "$work/views")"
}

pickles() {
    make_set; up 1; dayfly stage-in "$sets/$set" /dayfly/set 2> /dev/null
    for _ in $(seq "$runs"); do "$python" "$here/python/items.py" pickles /dayfly/set; done > "$work/pickles"
    dayfly down > /dev/null
    show "samples of 110 KB from 4 workers, per second, as views" "$(cut -d' ' -f1 "$work/pickles" | median)"
    show "the same, as bytes" "$(cut -d' ' -f2 "$work/pickles" | median)"
}

photos() {
    mkdir "$work/tmpfs"; mount -t tmpfs tmpfs "$work/tmpfs"
    "$python" - "$work/tmpfs" $photos << 'END'
import sys
import numpy as np
from PIL import Image
numbers = np.random.default_rng(1)
for number in range(int(sys.argv[2])):
    coarse = Image.fromarray(numbers.integers(0, 256, (47, 62, 3), np.uint8))
    coarse.resize((500, 375), Image.Resampling.BICUBIC).save(f"{sys.argv[1]}/{number}.jpg", quality=90)
END
    up 1; dayfly stage-in "$work/tmpfs" /dayfly/photos 2> /dev/null
    for _ in $(seq "$runs"); do
        read -r plain sum < <("$python" "$here/python/items.py" photos "$work/tmpfs")
        read -r ours ours_sum < <("$python" "$here/python/items.py" photos "$work/tmpfs" /dayfly/photos)
        read -r paths paths_sum < <(dayfly exec -- "$python" "$here/python/items.py" photos /dayfly/photos)
        [ "$sum" = "$ours_sum" ] && [ "$sum" = "$paths_sum" ] || { echo "the pixels differ" >&2; exit 1; }
        awk -v a="$plain" -v b="$ours" -v c="$paths" 'BEGIN {print b / a, c / a}'
    done > "$work/photos"
    dayfly down > /dev/null
    umount "$work/tmpfs"; rmdir "$work/tmpfs"
    show "epoch of 4 workers that decode JPEGs: Samples, x tmpfs" "$(cut -d' ' -f1 "$work/photos" | median)"
    show "the same: unmodified reader under dayfly exec, x tmpfs" "$(cut -d' ' -f2 "$work/photos" | median)"
}

shares() { # how many samples of other nodes a rank reads
    local batch=32 ranks=4 epochs=5
    dayfly-bench make "$work/small" --samples 20000 --mean-size 3000
    up $ranks; dayfly stage-in "$work/small" /dayfly/small 2> /dev/null; dayfly tune --cache off > /dev/null
    rm -rf "$work/small"
    for q in 0 0.1 0.3 0.5 1; do
        for rank in 0 1 2 3; do
            DAYFLY_NODE=$rank "$python" "$here/python/shares.py" /dayfly/small $q $batch $ranks $epochs > "$work/rank$rank" &
        done
        wait $(jobs -p | grep -v "^$pfs\$")
        "$python" - $q $batch $ranks $epochs "$work"/rank? << 'END'
import json, math, sys
q, batch, ranks, epochs = float(sys.argv[1]), *map(int, sys.argv[2:5])
by_rank = [json.load(open(name)) for name in sys.argv[5:]]
for epoch in range(epochs):
    read = [item for rank in by_rank for item in rank[epoch]["read"]]
    assert sorted(read) == list(range(20000)), "a sample was not read exactly once"
remote = sum(epoch["remote"] for rank in by_rank for epoch in rank)
total, lent = 20000 * epochs, int(q * batch + 1e-9) / batch
away = 1 - 1 / ranks
expected = lent * away
sigma = math.sqrt(max(total * lent * away * (1 - away), 1)) / total
print(f"  q = {q}: {remote / total:.4f} of the samples read were remote; expected {expected:.4f}, {(remote / total - expected) / sigma:+.1f} sigma")
END
    done
    dayfly down > /dev/null
}

accuracy() { "$python" "$here/python/accuracy.py"; }

# PRISMA's experiment (Macedo et al.): training time over files on a throttled file system. The stage-in counts.
training() { # FRAMEWORK
    make_set
    # 400 MB/s for all reads together, and 2 ms for each operation; operations overlap. Nothing is in the page cache.
    dayfly-bench pfs "$sets" "$work/mnt" --rate 400000000 --delay-ms 2 & pfs=$!
    until mountpoint -q "$work/mnt"; do kill -0 "$pfs"; sleep 0.1; done
    local epochs=3
    for model in LeNet:0.01 AlexNet:0.03 ResNet-50:0.12; do
        for workers in 0 4 8; do
            for _ in $(seq "$runs"); do
                sync; echo 3 > /proc/sys/vm/drop_caches
                plain=$("$python" "$here/python/training.py" "$1" "$work/mnt/$set" $epochs $workers "${model#*:}" 2>> "$work/errors")
                up 1 --stage-in-workers 16
                start=$(date +%s.%N)
                dayfly stage-in "$work/mnt/$set" /dayfly/set 2> /dev/null
                staged=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN {print b - a}')
                ours=$(dayfly exec -- "$python" "$here/python/training.py" "$1" /dayfly/set $epochs $workers "${model#*:}" integrated 2>> "$work/errors")
                dayfly down > /dev/null
                awk -v a="$plain" -v b="$ours $staged" 'function sum(t,  p, n, s) {n = split(t, p, " "); while (n) s += p[n--]; return s} BEGIN {print sum(a), sum(b), sum(b) / sum(a)}'
            done > "$work/times"
            show "$1, ${model%:*}, $workers workers: the file system alone, s" "$(cut -d' ' -f1 "$work/times" | median)"
            show "  Dayfly with its stage-in, s" "$(cut -d' ' -f2 "$work/times" | median)"
            show "  Dayfly, x the file system alone" "$(cut -d' ' -f3 "$work/times" | median)"
        done
    done
    kill "$pfs"; wait "$pfs" || true; pfs=
}
pytorch() { training pytorch; }
tensorflow() { training tensorflow; }

for row in $rows; do
    case $row in
        begin | views | threads | told | pickles | photos | shares | accuracy | pytorch | tensorflow) echo "$row"; "$row" ;;
        *) echo "unknown row '$row'; see the head of this script" >&2; exit 2 ;;
    esac
done
