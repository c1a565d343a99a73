#!/bin/sh
# A sweep with a Slurm job for each combination, by Hydra's submitit launcher (pip install 'fpexp[slurm]'):
#   scripts/slurm/sweep.sh task=a5 model=fp_mamba_k,lstm seed=0,1,2 hydra.launcher.partition=gpu
# It waits for them and prints the summary. A job at the end of its time saves and is queued again; the same command
# again runs what is missing.
exec fpexp train -m hydra/launcher=submitit_slurm hydra.launcher.gpus_per_node=1 hydra.launcher.cpus_per_task=8 \
    hydra.launcher.timeout_min=720 hydra.launcher.max_num_timeout=10 hydra.launcher.signal_delay_s=120 "$@"
