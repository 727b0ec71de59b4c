#!/bin/bash
#BSUB -n 256 -R "span[ptile=32]"
exec dayfly run --data-dir /local/scratch --stage-in '/pfs/train-*.tar:/dayfly/train' -- \
    mpiexec -n 8 dayfly exec -- python3 train.py /dayfly/train
