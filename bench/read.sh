#!/usr/bin/env bash
# Measures reads in a session of four servers in network namespaces, and compares them with one bare TCP stream between
# two of those namespaces.
# Usage: bench/read.sh [RUNS [ROW...]]     rows: remote-large remote-small posix unet local epochs cold
# Needs root, and dayfly, dayfly-bench (builds of the profile dist), fio and python3 in PATH. DAYFLY_BENCH_DIR keeps the datasets.
set -euo pipefail
runs=${1:-5}; shift || true
rows=${*:-remote-large remote-small posix unet local epochs cold}
here=$(cd "$(dirname "$0")" && pwd)
sets=${DAYFLY_BENCH_DIR:-$(mktemp -d)}
work=$(mktemp -d)
trap 'rm -rf "$work"; [ -n "${DAYFLY_BENCH_DIR:-}" ] || rm -rf "$sets"' EXIT

make_set() { # NAME OPTIONS... -> $sets/NAME.tar
    [ -f "$sets/$1.tar" ] && return
    dayfly-bench make "$sets/$1" "${@:2}"
    tar -C "$sets/$1" -cf "$sets/$1.tar" . && rm -rf "${sets:?}/$1"
}

# Stages in the set $1 in a session of four namespaces, and runs function $2 of this file there.
in_session() {
    DAYFLY_SET=$sets/$1.tar DAYFLY_RUNS=$runs "$here/namespaces.py" --memory "${DAYFLY_BENCH_MEMORY:-256MiB}" "$work/session" bash -c "$(declare -f); set -euo pipefail; stage; $2"
}
stage() { dayfly stage-in "$DAYFLY_SET" /dayfly/set >/dev/null 2>&1; dayfly tune --cache off >/dev/null; }
median() { sort -n | awk '{v[NR]=$1} END {print v[int((NR+1)/2)]}'; }
# Prints the CPU seconds that all servers have used so far.
server_cpu() { for pid in $DAYFLY_PID_0 $DAYFLY_PID_1 $DAYFLY_PID_2 $DAYFLY_PID_3; do awk '{print $14+$15}' "/proc/$pid/stat"; done | awk '{s+=$1} END {print s/100}'; }
tcp() { # prints the bytes/s of one stream
    ip netns exec df1 dayfly-bench stream --listen "$DAYFLY_ADDRESS_1:5201" & local listener=$!
    sleep 0.2
    dayfly-bench stream --connect "$DAYFLY_ADDRESS_1:5201" --bytes "${1:-1073741824}"
    kill $listener; wait $listener 2>/dev/null || true
}
# Runs a command and the TCP stream in turn: NAME SAMPLES_PER_RUN COMMAND... Prints both medians and their ratio.
beside_tcp() {
    local name=$1 count=$2 run; shift 2
    : > "$work_rates"; : > "$work_tcp"
    for run in $(seq "$DAYFLY_RUNS"); do
        tcp >> "$work_tcp"
        "$@" --samples "$count" --skip $((skip)) >> "$work_rates"; skip=$((skip + count))
    done
    awk -v name="$name" -v samples="$(cut -d' ' -f1 "$work_rates" | median)" -v bytes="$(cut -d' ' -f2 "$work_rates" | median)" \
        -v tcp="$(median < "$work_tcp")" 'BEGIN {printf "%-44s %9.0f samples/s %6.2f GB/s; one TCP stream %5.2f GB/s: %.2f\n", name, samples, bytes/1e9, tcp/1e9, bytes/tcp}'
}
# Reads the first $1 samples, and skips them for the rest of the row. This fills the arena once, so that the first touch of the
# arena's memory is not measured.
warm_up() { skip=$1; work_rates=$(mktemp); work_tcp=$(mktemp); dayfly-bench read --batch "$2" --samples "$1" >/dev/null; }

remote_large() {
    warm_up 3000 64
    beside_tcp "remote 110 KB, batches of 64, views" 960 dayfly-bench read --batch 64
}
remote_small() {
    warm_up 100000 256
    local before; before=$(server_cpu)
    beside_tcp "remote 3 KB, batches of 256, views" 25600 dayfly-bench read --batch 256
    beside_tcp "remote 3 KB, one at a time" 3000 dayfly-bench read --how one
}
posix_rows() { # NAME SAMPLES
    warm_up "$3" 64
    beside_tcp "$1" "$2" dayfly exec --node 0 -- dayfly-bench read --how posix --submit
}
posix_small() { posix_rows "3 KB by open/fstat/read/close, ordered" 30000 100000; }
posix_large() { posix_rows "110 KB by open/fstat/read/close, ordered" $((12000 / DAYFLY_RUNS)) 3000; }
unet() {
    warm_up 2 1
    skip=0
    local run; : > "$work_rates"; : > "$work_tcp"
    for run in $(seq "$DAYFLY_RUNS"); do
        tcp >> "$work_tcp"
        dayfly-bench read --from any --how one --samples 1 --skip "$run" >> "$work_rates"
    done
    awk -v bytes="$(cut -d' ' -f2 "$work_rates" | median)" -v tcp="$(median < "$work_tcp")" \
        'BEGIN {printf "%-44s %6.2f GB/s; one TCP stream %5.2f GB/s: %.2f\n", "a whole file of 146 MB", bytes/1e9, tcp/1e9, bytes/tcp}'
}
local_rows() {
    local how run
    for how in "views" "views --touch copy" "views --touch sum" "buffers" "one"; do
        for run in $(seq "$DAYFLY_RUNS"); do
            # shellcheck disable=SC2086
            dayfly-bench read --from local --how $how --batch 256 --samples 25000 --passes 3
        done | cut -d' ' -f1 | median | awk -v how="$how" '{printf "local 3 KB, batches of 256, %-20s %9.0f samples/s\n", how, $1}'
    done
}
epochs() {
    dayfly tune --cache all >/dev/null
    local epoch
    for epoch in 1 2 3; do
        dayfly-bench read --from any --how buffers --batch 256 --samples 100000 | awk -v epoch=$epoch '{printf "epoch %s, 3 KB, batches of 256, all samples %9.0f samples/s\n", epoch, $1}'
        sleep 1
    done
    dayfly-bench read --from local --how buffers --batch 256 --samples 100000 | awk '{printf "the same, only samples that are local by now %30.0f samples/s\n", $1}'
    dayfly status | grep -E "^0 .*%"
}

# Cold: everything runs in a control group whose memory is a third of the data. fio reads the same drive for comparison.
cold() { # NAME BATCH BLOCK_LEN LOCAL_SAMPLES REMOTE_SAMPLES SAMPLES_TO_WARM_UP; the numbers of samples are for all runs together
    work_rates=$(mktemp); work_tcp=$(mktemp)
    local from run count fio_file=$DAYFLY_BENCH_WORK/fio
    for from in local remote; do
        # Remote reads begin after the arena's memory has been touched once.
        if [ $from = local ]; then skip=0 count=$(($4 / DAYFLY_RUNS)); else
            skip=$6 count=$(($5 / DAYFLY_RUNS)); dayfly-bench read --batch "$2" --samples "$6" >/dev/null
        fi
        : > "$work_rates"; : > "$work_tcp"
        for run in $(seq "$DAYFLY_RUNS"); do
            sync; echo 3 > /proc/sys/vm/drop_caches
            fio --name=cold --filename="$fio_file" --rw=randread --bs="$3" --iodepth=32 --ioengine=libaio --direct=1 --runtime=3 --time_based \
                --output-format=json | python3 -c 'import json, sys; print(json.load(sys.stdin)["jobs"][0]["read"]["bw_bytes"])' >> "$work_tcp"
            dayfly-bench read --from $from --touch copy --batch "$2" --samples $count --skip $skip >> "$work_rates"; skip=$((skip + count))
        done
        awk -v name="cold, $from, $1, batches of $2" -v bytes="$(cut -d' ' -f2 "$work_rates" | median)" -v fio="$(median < "$work_tcp")" \
            'BEGIN {printf "%-44s %7.1f MB/s; fio %7.1f MB/s: %.2f\n", name, bytes/1e6, fio/1e6, bytes/fio}'
    done
}
cold_large() { cold "110 KB" 64 110592 4800 12800 1200; }
cold_small() { cold "3 KB" 256 3072 25600 25600 30000; }
in_little_memory() { # SET FUNCTION BYTES_OF_SAMPLES
    local group=/sys/fs/cgroup/memory/dayfly-bench bytes
    [ -d /sys/fs/cgroup/memory ] || { group=/sys/fs/cgroup/dayfly-bench; }
    bytes=$(($3 / 3))
    mkdir -p "$group"
    if [ -f "$group/memory.limit_in_bytes" ]; then echo $bytes > "$group/memory.limit_in_bytes"; else echo $bytes > "$group/memory.max"; fi
    [ -f "$work/fio" ] || fio --name=lay --filename="$work/fio" --size=2G --rw=write --bs=1M --direct=1 >/dev/null
    (echo $BASHPID > "$group/cgroup.procs"; DAYFLY_BENCH_WORK=$work DAYFLY_BENCH_MEMORY=64MiB in_session "$1" "$2")
    rmdir "$group" 2>/dev/null || true
}

for row in $rows; do
    case $row in
    remote-large) make_set large --samples 20000 --mean-size 110000; in_session large remote_large ;;
    remote-small) make_set tiny --samples 400000; in_session tiny remote_small ;;
    posix) make_set tiny --samples 400000; in_session tiny posix_small; make_set large --samples 20000 --mean-size 110000; in_session large posix_large ;;
    unet) make_set unet --samples 8 --mean-size 146000000; in_session unet unet ;;
    local) make_set small --samples 100000; in_session small local_rows ;;
    epochs) make_set small --samples 100000; in_session small epochs ;;
    cold) make_set large --samples 20000 --mean-size 110000; in_little_memory large cold_large 2200000000; make_set tiny --samples 400000; in_little_memory tiny cold_small 1200000000 ;;
    *) echo "unknown row '$row'" >&2; exit 2 ;;
    esac
done
