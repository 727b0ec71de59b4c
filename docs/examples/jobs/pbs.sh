#!/bin/bash
#PBS -l select=8:ncpus=32:mpiprocs=1
# A shared folder: pbsdsh passes no standard input, so a file here carries the session's key.
cd "$PBS_O_WORKDIR" || exit
exec dayfly run --data-dir /local/scratch --stage-in '/pfs/train-*.tar:/dayfly/train' -- \
    mpiexec -n 8 dayfly exec -- python3 train.py /dayfly/train
