#!/usr/bin/env bash
# Measures what readers and a stage-in notice while their servers get no processor for seconds. METHOD.md says what the rows mean.
# Usage: bench/starved.sh [--runs N] [--no-goals] [ROW...]
#   rows: busy slow frozen servers-frozen one-frozen (default: all); each also for a compressed tar
# Prints one table. The exit status is 1 if a goal was missed, unless --no-goals is given.
# Needs root and control groups, and dayfly, dayfly-bench (builds of the profile dist), e2fsprogs and python3 in PATH.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
samples=10000 sizes="--mean-size 50000 --log-normal 0.5"
work=$(mktemp -d)
finish() { ! mountpoint -q "$work/disk" || umount "$work/disk"; rm -rf --one-file-system "$work"; }
trap finish EXIT
truncate -s 12G "$work/image"
mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 "$work/image"
mkdir "$work/disk"
mount -o loop "$work/image" "$work/disk"
# shellcheck disable=SC2086
dayfly-bench make "$work/tree" --samples $samples $sizes
tar -C "$work/tree" -cf "$work/disk/plain.tar" .
gzip -1 < "$work/disk/plain.tar" > "$work/disk/compressed.tar.gz"
rm -rf "$work/tree"
"$here/starved.py" --sizes="$sizes" "$work/disk" "$@"
