#!/usr/bin/env bash
# Starts a process of a run again when it was lost: killed, or with status 75.
#
#   scripts/restart_on_failure.sh TIMES COMMAND...
#
# It comes back with --join to a run that goes on without it, or has ended meanwhile,
# unless it has waited in vain for the others (status 69). SIGINT, SIGTERM and SIGUSR1
# are passed on, and end this too.
set -uo pipefail
left=${1:?TIMES is missing}
shift
told=

pass_on() {
  told=1
  kill "-$1" "$child" 2>/dev/null
}
for signal in INT TERM USR1; do
  # shellcheck disable=SC2064
  trap "pass_on $signal" $signal
done

lost=  # the status before this start
while :; do
  # Background processes of a script ignore SIGINT, unless it is given back.
  (
    trap - INT
    exec "$@" ${lost:+--join}
  ) &
  child=$!
  while :; do
    wait "$child"
    status=$?
    # A trap ends `wait` before the child has ended.
    kill -0 "$child" 2>/dev/null || break
  done
  [ -z "$told" ] || exit "$status"
  case $status in
    2 | 69) exit "${lost:-$status}" ;;  # nobody takes it back, or nobody came
    75) ;;
    *) [ "$status" -gt 128 ] && [ "$status" != 130 ] || exit "$status" ;;  # 130: Ctrl-C
  esac
  lost=$status
  [ "$left" -gt 0 ] || exit "$status"
  left=$((left - 1))
  echo "lost with status $status: starting it again ($left times more)" >&2
done
