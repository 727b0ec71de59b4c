#!/bin/bash
# This waits for 8 servers, and then removes the key file, which only you can read.
dayfly up --launcher manual --nodes 8 --key-file "$PWD/session.key" &
until [ -s session.key ] || ! kill -0 %1; do sleep 0.1; done
mylauncher --one-per-node dayfly serve --key-file "$PWD/session.key" &
wait %1 && dayfly stage-in '/pfs/train-*.tar' /dayfly/train &&
    mylauncher dayfly exec -- python3 train.py /dayfly/train
status=$?
dayfly down
exit "$status"
