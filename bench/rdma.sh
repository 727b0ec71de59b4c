#!/usr/bin/env bash
# Counts what a batch of 64 samples of 110 KB each costs the servers at both ends, over RDMA and over TCP: system calls, and work
# for the card. It measures no rates, because the rates of Soft-RoCE say nothing about a real card. Needs root, strace, python3 and
# an RDMA card. These commands run it in a virtual machine that emulates a card:
#
#   cargo build --profile dist && cargo build --profile dist -p dayfly-bench
#   tests/vm/run -m 3500 -- bench/rdma.sh
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/target/dist:$PATH
work=$(mktemp -d)
trap 'umount "$work/drive" 2> /dev/null || true; rm -rf "$work"' EXIT
mkdir "$work/set" "$work/drive" "$work/run"
export DAYFLY_RUNTIME_DIR=$work/run
for number in $(seq 700); do head -c 110000 /dev/urandom > "$work/set/$number"; done
# Uses ext4 rather than tmpfs, because a server can ask what is in the page cache only on a real file system.
truncate -s 700M "$work/disk"; mkfs.ext4 -q "$work/disk"; mount -o loop "$work/disk" "$work/drive"

batches=4
for transport in rdma tcp; do
    dayfly up --local 2 --transport $transport --memory 128M --stage-in-memory 256M --data-dir "$work/drive" > /dev/null
    dayfly stage-in "$work/set" /dayfly/set 2> /dev/null > /dev/null
    dayfly tune --cache off > /dev/null
    dayfly-bench read --from remote --batch 64 --samples 64 > /dev/null
    tracers=()
    for node in 0 1; do
        strace -f -c -o "$work/calls-$node" -p "$(cat "$work"/run/*/*/node-$node.lock)" 2> /dev/null & tracers+=($!)
    done
    sleep 3
    dayfly status --json > "$work/before"
    dayfly-bench read --from remote --batch 64 --samples $((64 * batches)) --skip 64 > /dev/null
    kill -INT "${tracers[@]}"; wait "${tracers[@]}" || true
    dayfly status --json > "$work/after"
    dayfly down > /dev/null
    python3 - "$work" $transport $batches <<'PYTHON'
import json, sys
work, transport, batches = sys.argv[1], sys.argv[2], int(sys.argv[3])
load = lambda name: json.load(open(f"{work}/{name}"))["nodes"]
before, after = load("before"), load("after")
for node, role in enumerate(["reader", "owner"]):
    calls = {}
    for line in open(f"{work}/calls-{node}"):
        words = line.split()
        # clock_gettime is a system call only in a virtual machine. The last line is the sum.
        if len(words) >= 5 and words[3].isdigit() and words[-1] not in ("total", "clock_gettime"):
            calls[words[-1]] = int(words[3]) / batches
    most = sorted(calls.items(), key=lambda call: -call[1])[:5]
    card = {name: (after[node]["network"][name] - before[node]["network"][name]) / batches
            for name in ("posts", "works", "completions", "wake_ups")}
    print(f"{transport:5} {role}: {sum(calls.values()):.0f} system calls per batch ({', '.join(f'{name} {count:.0f}' for name, count in most)}); card: {card}")
PYTHON
done
