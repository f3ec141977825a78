# shellcheck shell=bash
# What train.sbatch and server.sbatch share; they source it with the arguments
# of main.py. It ends them where no task could start.

workdir=
previous=
for argument in "$@"; do
  case $argument in
    --workdir=*) workdir=${argument#*=} ;;
    *) [ "$previous" != --workdir ] || workdir=$argument ;;
  esac
  previous=$argument
done
if [ -z "$workdir" ]; then
  echo 'error: --workdir is missing: a job that goes on needs to find its run' >&2
  exit 2
fi
mkdir -p "$workdir/logs" || exit 2

# A node that cannot write its tasks' logs would keep srun waiting. What the
# first node has just made may take others a while to see.
nodes=${SLURM_JOB_NUM_NODES:-1}
if [ "$nodes" -gt 1 ]; then
  # shellcheck disable=SC2016
  blind=$(timeout 120 srun --nodes="$nodes" --ntasks="$nodes" \
    --ntasks-per-node=1 bash -c 'for i in {1..15}; do
      ls "$0" &>/dev/null && exit
      sleep 1
    done
    echo "blind: $SLURMD_NODENAME"' "$workdir/logs" |
    sed -n 's/^blind: //p' | paste -sd ' ')  # a site's prolog may greet
  if [ -n "$blind" ]; then
    echo "error: --workdir=$workdir: $blind does not see it; it must be a" \
      'folder that all nodes share' >&2
    exit 2
  fi
fi

# Of srun, for the job as it is now: one that waited may have got another number
# of nodes, and its SLURM_NTASKS is still that of its submission.
layout=(--nodes="$nodes")
if [ -n "${SLURM_NTASKS_PER_NODE:-}" ]; then
  layout+=(--ntasks="$((nodes * SLURM_NTASKS_PER_NODE))"
    --ntasks-per-node="$SLURM_NTASKS_PER_NODE")
fi

# Of srun. Bound to cores, a task without a number of its own would get one of
# those that the job has; Slurm 22.05 and newer do not pass that on to steps.
cores=(--cpu-bind=none)
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then
  cores=(--cpu-bind=cores "--cpus-per-task=$SLURM_CPUS_PER_TASK")
fi

# To Slurm, the number of one task of an array is that of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-$SLURM_JOB_ID}

# Which file says that the run was stopped, if any.
marker() {
  stat -c '%i %y' "$workdir/stopped.json" 2>/dev/null
}
marker_before=$(marker)

# Whether this start left it, and not an earlier one.
is_stopped() {
  local now
  now=$(marker) && [ "$now" != "$marker_before" ]
}

# Votes of all tasks to stop.
pass_on() {
  echo "$1: asking all tasks to save and stop"
  timeout 30 scancel --signal=USR1 "$job"
}
