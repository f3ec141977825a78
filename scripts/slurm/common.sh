# shellcheck shell=bash
# What train.sbatch and parameter_server.sbatch share; they source it with the arguments
# of main.py. It ends them where no task could start.

# The signal that asked this script to stop: the time limit's, say. Before there
# are tasks it is only noted.
asked=
trap 'asked=USR1' USR1
trap 'asked=TERM' TERM

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
if [[ $workdir == *://* ]]; then
  echo "error: --workdir=$workdir: expected a folder that all nodes share: this" \
    'script keeps the logs of the tasks there' >&2
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

start=$((${SLURM_RESTART_COUNT:-0} + 1))

# What earlier starts wrote to the logs of the tasks, in bytes.
declare -A log_sizes
for log in "$workdir/logs/$SLURM_JOB_ID"-*.log; do
  [ ! -f "$log" ] || log_sizes[$log]=$(wc -c <"$log")
done

# The end of a task's log, without the lines of an earlier start.
show_end() {
  local log=$workdir/logs/$SLURM_JOB_ID-$1.log lines
  lines=$(tail -c "+$((${log_sizes[$log]:-0} + 1))" "$log" 2>/dev/null |
    tail -n 3)
  if [ -n "$lines" ]; then
    printf 'the end of task %s in start %s:\n%s\n' "$1" "$start" "$lines"
  else
    echo "task $1 wrote nothing in start $start"
  fi
}

# Errors of srun itself, and of tasks that ended badly.
srun_log=$workdir/logs/$SLURM_JOB_ID-srun.log

# Whether there were tasks at all: else srun's status is not the program's.
is_created() {
  ! grep -q '^srun: error: Unable to create step' "$srun_log"
}

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
  asked=$1
  echo "$1: asking all tasks to save and stop"
  timeout 30 scancel --signal=USR1 "$job"
}

# When the job ends, for a save in time: Slurm 22.05 does not tell it.
export_end_time() {
  : "${SLURM_JOB_END_TIME:=$(date +%s -d "$(timeout 30 squeue -h -o %e \
    -j "$job" 2>/dev/null)" 2>/dev/null)}"
  export SLURM_JOB_END_TIME
}

# The newest step; of a ring, that of each model added up.
newest() {
  find "$workdir"/{,models/*/}checkpoints -maxdepth 1 -name '[0-9]*' \
    ! -name '*[!0-9]*' -printf '%h\t%f\n' 2>/dev/null | awk -F '\t' '
    $2 > step[$1] + 0 { sum += $2 - step[$1]; step[$1] = $2 }
    END { if (NR) print sum + 0 }'
}

# Whether what was passed on ended a task that had no handler for it yet: it was
# starting, and had nothing to save. 138 is 128 and the number of SIGUSR1.
is_early() {
  [ -n "$asked" ] && { [ "$status" = 138 ] || grep -qE \
    '^srun: error: .*: tasks? [0-9,-]+: (User defined signal 1|Exited with exit code 138)' \
    "$srun_log"; }
}

# Starts this job again, unless somebody cancelled it, or three starts in a row
# came no further.
again() {
  local why=$1 status=$2 state tries=0 at last
  state=$(timeout 30 squeue -h -j "$job" -o %T 2>/dev/null)
  if [ "$state" != RUNNING ]; then
    echo "$why; the job is ${state:-gone}: not started again"
    exit "$status"
  fi
  at=$(newest)
  at=${at:-0}
  read -r last tries 2>/dev/null <"$workdir/restarts" || last=
  [ "$last" = "$at" ] && tries=$((tries + 1)) || tries=1
  echo "$at $tries" >"$workdir/restarts"
  if [ "$tries" -gt 3 ]; then
    echo "error: $why; three starts came no further than step $at: giving up" >&2
    exit "$((status ? status : 1))"
  fi
  echo "$why at step $at: starting job $job again"
  # Slurm ends this script with a SIGTERM, which is not for the next start.
  trap - USR1 TERM
  timeout 60 scontrol requeue "$job" || exit "$((status ? status : 1))"
  sleep 60
  exit "$status"
}

[ -z "$asked" ] || again "$asked came before there were tasks" 0
# A trap waits for a command in the foreground: srun is in the background.
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM
