# Runs the parts of the script that reads this file, each with a log, and ends.
#
# `parts` prints, a line each, a name and the arguments of `python -m`, whose words have no
# spaces in them. `out` is the folder of the logs, `limit` the most seconds of a part (0: none),
# `cifar10` the path of that set, `tree` that of its images, and `platform` where studies
# compute (empty: as JAX_PLATFORMS says).
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

if [ "${1:-}" = --list ]; then
  parts | sed -E "s/^([^ ]*)/\1: python -m/; s/ ([^ ]*[(][^ ]*)/ '\1'/g"
  exit
fi
names=$(parts | cut -d' ' -f1)
for name in "$@"; do
  if ! grep -qx -- "$name" <<<"$names"; then
    echo "error: $name: expected some of" $names >&2
    exit 2
  fi
done
mkdir -p "$out" || exit 2
{ nvidia-smi -L; "$python" -m pip list; } >"$out/machine.txt" 2>&1

summary='' failed=0
while read -r name command; do
  [ $# -eq 0 ] || [[ " $* " == *" $name "* ]] || continue
  echo "$name: python -m $command"
  if [[ $command == *"=$out/cifar10.npz"* ]] && [ ! -e "$out/cifar10.npz" ]; then
    # Pillow reads the images once, for all parts.
    "$python" -m scripts.pack_arrays "$tree" "$out/part.npz" && mv "$out/part.npz" "$out/cifar10.npz"
  fi
  begin=$SECONDS log=$out/$name.log json=$out/$name.json where=
  # Runs of simulated workers, whose own speed is not measured, would take the CPU.
  [[ $command == *tools.study* && ${platform:-} ]] && where="env JAX_PLATFORMS=$platform"
  # Ctrl-C reaches what is in the terminal's group; a limit ends the children of a study, too.
  [ "$limit" -gt 0 ] && ends="timeout --kill-after=5 $limit" || ends=
  $ends $where "$python" -m $command >"$log" 2>&1 </dev/null
  case $? in
    0) ending=done ;;
    124 | 137) ending="stopped after $limit s" ;;
    *) ending="failed: $(grep -v "^{" "$log" | tail -n 1 | cut -c -90)" ;;
  esac
  [ "$ending" = done ] || failed=1
  grep '^{' "$log" | tail -n 1 >"$json"
  [ -s "$json" ] || cat "$out/$name/"{benchmark,ensemble}.json >"$json" 2>/dev/null
  [ -s "$json" ] || rm -f "$json"
  line=$(printf '%-17s %4d s  %s' "$name" $((SECONDS - begin)) "$ending")
  echo "$line"
  summary+="$line"$'\n'
done < <(parts)
printf '\n%s' "$summary" | tee "$out/summary.txt"
exit $failed
