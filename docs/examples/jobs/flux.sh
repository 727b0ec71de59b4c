#!/bin/bash
# flux: -N 8
exec dayfly run --data-dir /local/scratch --stage-in '/pfs/train-*.tar:/dayfly/train' -- \
    flux run -N 8 python3 train.py /dayfly/train
