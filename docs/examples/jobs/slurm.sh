#!/bin/bash
#SBATCH --nodes=8 --ntasks-per-node=4 --time=04:00:00
exec dayfly run --data-dir /local/scratch --stage-in '/pfs/imagenet/train-*.tar:/dayfly/train' -- \
    srun python3 train.py /dayfly/train
