#!/usr/bin/env bash
# Trains with N processes on this machine, to try out what a cluster does.
#
#   scripts/launch_local.sh N [--devices=D] [--bind] [--again=T] ARGUMENTS OF main.py
#
# --devices=D  CPU devices of each process (default 1)
# --bind       a share of the cores for each process
# --again=T    start a process that was lost again, T times
#
# The variable PROGRAM is another program for the interpreter, such as "-m a.b".
# Of several processes, each line begins with the rank.
# SIGINT, SIGTERM and SIGUSR1 go to all processes. When one fails, the others get
# 15 s to end as well; without one that is lost (killed, or status 69 or 75) a run may
# go on. The status is that of the first that ended badly, or 0 if the run went on.
set -uo pipefail
here=$(dirname "$(readlink -f "$0")")
read -r -a program <<<"${PROGRAM:--m anp_jax}"
grace=15

usage() {
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 2
}

[[ ${1:-} =~ ^[1-9][0-9]*$ ]] || usage
count=$1
shift
devices=1
bind=
again=
while [ $# -gt 0 ]; do
  case $1 in
    --devices=*) devices=${1#*=} ;;
    --bind) bind=1 ;;
    --again=*) again=${1#*=} ;;
    *) break ;;
  esac
  shift
done
[[ $devices =~ ^[1-9][0-9]*$ ]] || usage
[[ $again =~ ^[0-9]*$ ]] || usage

python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python; } ||
  python=python3
port=${PORT:-$("$python" -c 'import socket
with socket.socket() as s:
  s.bind(("127.0.0.1", 0))
  print(s.getsockname()[1])')} || exit 1
cores=()
if [ -n "$bind" ] && command -v taskset >/dev/null; then
  # Those that this shell may use, which need not begin at 0.
  read -r -a cores < <("$python" -c 'import os
print(*sorted(os.sched_getaffinity(0)))')
fi

# What labels the lines of a process outlives it, and so passes on its last words.
label() {
  trap '' HUP INT TERM USR1
  exec sed -u "s/^/[$1] /"
}

pids=()
for ((i = 0; i < count; i++)); do
  command=("$python" "${program[@]}" "--coordinator=127.0.0.1:$port"
    "--num_processes=$count" "--process_id=$i" "$@")
  [ -z "$again" ] || command=("$here/restart_on_failure.sh" "$again" "${command[@]}")
  if [ ${#cores[@]} -gt 0 ]; then
    first=$((i * ${#cores[@]} / count))
    many=$(((i + 1) * ${#cores[@]} / count - first))
    mine=("${cores[@]:first:many > 0 ? many : 1}")
    command=(taskset -c "$(IFS=,; echo "${mine[*]}")" "${command[@]}")
  fi
  # Background processes of a script ignore SIGINT, unless it is given back.
  (
    trap - INT
    export JAX_NUM_CPU_DEVICES="$devices"
    [ "$count" = 1 ] || exec > >(label "$i") 2> >(label "$i" >&2)
    exec "${command[@]}"
  ) &
  pids+=($!)
done

told=
pass_on() {
  told=1
  kill "-$1" "${pids[@]}" 2>/dev/null
}
for signal in INT TERM USR1; do
  # shellcheck disable=SC2064
  trap "pass_on $signal" $signal
done

running() {
  local pid left=()
  for pid in "${pids[@]}"; do
    kill -0 "$pid" 2>/dev/null && left+=("$pid")
  done
  pids=("${left[@]}")
  [ ${#pids[@]} -gt 0 ]
}

is_lost() {
  [[ $1 == 69 || $1 == 75 ]] || { [ "$1" -gt 128 ] && [ "$1" != 130 ]; }
}

# A trap interrupts `wait`, which then says nothing of the child: asked again.
status=0
ending=
went_on=
while running; do
  wait -n "${pids[@]}"
  code=$?
  running || true
  if [ "$code" != 0 ] && [ "$code" != 127 ] && [ "$status" = 0 ] &&
    [ ${#pids[@]} -lt "$count" ]; then
    status=$code
  fi
  case $code in
    0) went_on=1 ;;
    127) ;; # nobody was left to wait for
    *) went_on= ;;
  esac
  # Those that were told by a signal save first, each for itself.
  if [ "$status" != 0 ] && [ -z "$ending" ] && ! is_lost "$status" &&
    { [ "$status" != 130 ] || [ -z "$told" ]; }; then
    ending=1
    (
      sleep "$grace"
      # restart_on_failure.sh passes on what it can catch, so that its child ends, too.
      kill -TERM "${pids[@]}" 2>/dev/null
      sleep 2
      kill -KILL "${pids[@]}" 2>/dev/null
    ) &>/dev/null & # its `sleep` outlives it, and would hold a pipe open
    killer=$!
  fi
done
[ -z "$ending" ] || kill "$killer" 2>/dev/null
! is_lost "$status" || [ -z "$went_on" ] || status=0
exit "$status"
