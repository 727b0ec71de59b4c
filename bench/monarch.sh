#!/usr/bin/env bash
# Repeats Monarch's experiment (Dantas et al., CCGrid 2022) at 1/100 of its scale: 2 GiB in 2,048 TFRecord files on a slow parallel
# file system, a local tier with room for 55 %, three epochs, and memory for a third of the data.
# Usage: bench/monarch.sh PYTHON [FRAMEWORK...]     PYTHON has tensorflow and torch; frameworks: tensorflow pytorch
# Needs root, /dev/fuse, and dayfly, dayfly-bench (builds of the profile dist) in PATH. DAYFLY_BENCH_DIR keeps the dataset.
#
# Models are pauses of fixed length for each batch of 4 files. Reading such a batch takes the file system 21 ms; the pauses are 4, 8
# and 32 ms for LeNet, AlexNet and ResNet-50: the first two wait for their data, the last one does not.
# These lengths are ours, not the paper's ratios. The paper reports, with its own tier of 55 %: up to 28 % less time with
# TensorFlow, up to 37 % with PyTorch, and up to 56 % fewer operations.
# Rows:
#   PFS      the loader reads from the file system. A control group bounds what the kernel may keep of it: a third of the data,
#            besides the memory of the process itself.
#   LRU      simulated: a cache with room for 55 %, on the files in the order of the same epochs. It evicts whole files.
#   local    the loader reads a plain copy on the local drive.
#   Dayfly   one server with room for 55 %, and an arena of a third of the data. The stage-in is counted, and shown by itself.
# Operations are opens and reads at the file system, lookups not counted; it counts them itself.
set -euo pipefail
python=$1; shift
frameworks=${*:-tensorflow pytorch}
here=$(cd "$(dirname "$0")" && pwd)
sets=${DAYFLY_BENCH_DIR:-$(mktemp -d)}
work=$(mktemp -d)
mkdir "$work/mnt"
files=2048 size=1048576
pfs=
cleanup() {
    dayfly down > /dev/null 2>&1 || true
    [ -z "$pfs" ] || { kill "$pfs"; wait "$pfs" || true; }
    rm -rf "$work"; [ -n "${DAYFLY_BENCH_DIR:-}" ] || rm -rf "$sets"
}
trap cleanup EXIT
export TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0 CUDA_VISIBLE_DEVICES=
[ -d "$sets/monarch" ] || "$python" "$here/monarch/loader.py" make "$sets/monarch" $files $size

mount_pfs() { # OPTIONS...
    dayfly-bench pfs "$sets" "$work/mnt" --rate 200000000 --delay-ms 5 --counts "$work/counts" "$@" & pfs=$!
    until mountpoint -q "$work/mnt"; do kill -0 "$pfs"; sleep 0.1; done
}
unmount_pfs() { # sets ops, reads and bytes
    rm -f "$work/counts"; kill "$pfs"; wait "$pfs" || true; pfs=
    read -r ops reads bytes < <("$python" -c "import json; counts = json.load(open('$work/counts')); print(counts['opens'] + counts['reads'], counts['reads'], counts['bytes'])")
}
in_little_memory() { # MIB COMMAND...: with page cache for a third of the data, besides MIB for the processes
    local group=/sys/fs/cgroup/memory/dayfly-bench bytes=$((files * size / 3 + ($1 << 20))); shift
    [ -d /sys/fs/cgroup/memory ] || group=/sys/fs/cgroup/dayfly-bench
    mkdir -p "$group"
    if [ -f "$group/memory.limit_in_bytes" ]; then echo $bytes > "$group/memory.limit_in_bytes"; else echo $bytes > "$group/memory.max"; fi
    (echo $BASHPID > "$group/cgroup.procs"; exec "$@")
    rmdir "$group" 2>/dev/null || true
}
show() { # ROW SECONDS OPERATIONS BYTES [NOTE]
    awk -v row="$1" -v seconds="$2" -v ops="$3" -v bytes="$4" -v note="${5:-}" -v s0="$base_seconds" -v o0="$base_ops" -v b0="$base_bytes" \
        'BEGIN {printf "  %-8s %7.1f s (%+4.0f %%) %8d operations (%+4.0f %%) %6.2f GB (%+4.0f %%) %s\n", row, seconds, 100*(seconds/s0-1), ops, 100*(ops/o0-1), bytes/1e9, 100*(bytes/b0-1), note}'
}
sum() { tr ' ' '\n' | awk '{s+=$1} END {print s}'; }

for framework in $frameworks; do
    # The processes take 245 MiB and 926 MiB of anonymous memory.
    [ "$framework" = pytorch ] && memory=1000 || memory=320
    for model in ${DAYFLY_BENCH_MODELS:-LeNet:0.004 AlexNet:0.008 ResNet-50:0.032}; do
        pause=${model#*:}
        echo "$framework, ${model%:*}"
        mount_pfs --page-cache
        times=$(in_little_memory "$memory" "$python" "$here/monarch/loader.py" "$framework" "$work/mnt/monarch" 3 "$pause" 2>> "$work/errors" || { cat "$work/errors" >&2; exit 1; })
        unmount_pfs; base_ops=$ops base_bytes=$bytes base_reads=$reads
        base_seconds=$(sum <<< "$times")
        show PFS "$base_seconds" "$base_ops" "$base_bytes" "epochs: $times"
        "$python" - $files << 'END' > "$work/lru"
import collections, random, sys
files = int(sys.argv[1]); room = files * 55 // 100
cache, misses = collections.OrderedDict(), 0
for epoch in range(3):
    order = list(range(files)); random.Random(epoch).shuffle(order)
    for file in order:
        if file in cache:
            cache.move_to_end(file)
            continue
        misses += 1
        cache[file] = True
        if len(cache) > room:
            cache.popitem(last=False)
print(misses)
END
        # A missed file is opened, and read as often as the row above reads one.
        misses=$(cat "$work/lru")
        show LRU "$base_seconds" $((misses + misses * base_reads * size / base_bytes)) $((misses * size)) "(its time is not simulated)"
        times=$("$python" "$here/monarch/loader.py" "$framework" "$sets/monarch" 3 "$pause" 2>> "$work/errors" || { cat "$work/errors" >&2; exit 1; })
        show local "$(sum <<< "$times")" 0 0 "epochs: $times"
        mount_pfs
        dayfly up --local 1 --stage-in-workers 16 --capacity $((files * size * 55 / 100))B --memory $((files * size / 3))B --data-dir "$sets" > /dev/null
        start=$(date +%s.%N)
        dayfly stage-in "$work/mnt/monarch" /dayfly/monarch 2> "$work/stage-in"
        staged=$(awk -v a="$start" -v b="$(date +%s.%N)" 'BEGIN {print b-a}')
        times=$(dayfly exec -- "$python" "$here/monarch/loader.py" "$framework" /dayfly/monarch 3 "$pause" 2>> "$work/errors" || { cat "$work/errors" >&2; exit 1; })
        dayfly down > /dev/null
        unmount_pfs
        show Dayfly "$(sum <<< "$times $staged")" "$ops" "$bytes" "stage-in: $staged, epochs: $times"
    done
done
