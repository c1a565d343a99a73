#!/bin/sh
# The experiments of results/reference at scale=cpu, the most telling first: scripts/reproduce.sh [key=value ...]
# What is recorded there or finished before is not run again, so that the same command goes on where it was stopped;
# `scripts/reproduce.sh --status` says what is done. One thread each, as the recorded runs; for two jobs at once add
# hydra/launcher=joblib hydra.launcher.n_jobs=2.
set -u
verb='train -m'
[ "${1:-}" != --status ] || { verb='sweep status'; shift; }
words=$* code=0

sweep() {
    echo "fpexp $verb $*"
    # shellcheck disable=SC2086 # words are several
    fpexp $verb "$@" scale=cpu threads=1 $words || code=$?
    [ $code -lt 128 ] || exit $code # a signal; a job that failed does not stop the others
}

sweep experiment=reference_a4
sweep experiment=reference_a5
sweep experiment=fig4_state_tracking task=a5
sweep experiment=fig4_state_tracking task=s5 model=fp_mamba_h,fp_mamba_dplr model.channel_mixer.rank=2
sweep experiment=fig4_state_tracking task=s5 model=fp_mamba_k,lstm,mamba2,gdn
d=model.dependence # none, Q, b and c, all
sweep experiment=table1_dependence $d.lambda=false $d.Q=false,true $d.b=false $d.c=false
sweep experiment=table1_dependence $d.lambda=false $d.Q=false $d.b=true $d.c=true
sweep experiment=table1_dependence $d.lambda=true $d.Q=true $d.b=true $d.c=true
sweep experiment=fig1_iterations
sweep experiment=fig11_cap
sweep experiment=fig12_sequential_parallel
[ "$verb" != 'train -m' ] || fpexp bench complexity threads=1 || code=$?
sweep experiment=table4_modular_arithmetic model=fp_mamba_h,mamba,gdn,lstm
sweep experiment=fig6_training_time model=fp_mamba_h,mamba
exit $code
