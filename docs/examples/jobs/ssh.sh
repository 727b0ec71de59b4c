#!/bin/bash
# Start this on one of the nodes. This file, dayfly and train.py have the same paths on all of them.
nodes=(node0{1..8})
[ -n "$DAYFLY_SESSION" ] || exec dayfly run --hosts "$(IFS=,; echo "${nodes[*]}")" --data-dir /local/scratch \
    --stage-in '/pfs/train-*.tar:/dayfly/train' -- bash "$0"
# 'dayfly run' has started this file again, in its session.
dayfly=$(command -v dayfly)
for node in "${nodes[@]}"; do
    ssh "$node" "cd ${PWD@Q} && ${dayfly@Q} exec -- python3 train.py /dayfly/train" &
    ranks+=($!)
done
status=0
for rank in "${ranks[@]}"; do wait "$rank" || status=$?; done
exit "$status"
