#!/usr/bin/env bash
# Measures what needs an accelerator, in parts of less than three minutes, the
# most wanted first. docs/gpu.md says more.
#
#   scripts/accelerator.sh --list       the parts and their commands
#   scripts/accelerator.sh [PART...]    runs all of them, or these
#
# OUT=DIR (runs/accelerator) gets PART.log and, as each part ends, PART.json.
# PYTHON names the interpreter, MNIST the folder of its four files, for `methods`, and
# CIFAR10 that of its batches, for `cifar10`.
# SMALL=1 has tiny sizes, which try the parts on a CPU.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 2
out=${OUT:-runs/accelerator}
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
limit=175  # seconds of a part

recipe=:modern network=resnet50_gpu sizes='--rounds=6'
repeats=2 batches=128,256 target=gpu:h200:1x1 members='--members=16 --steps=2000 --rounds=1' runs=16
fast="--config=configs/cifar10_fast.py --config.data.source=arrays --config.data.path=${CIFAR10:-cifar10}"
digits="--config=configs/lenet.py:mnist --config.data.source=arrays --config.data.path=${MNIST:-mnist}"
seeds=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 examples=240000 platform=cuda
if [ "${SMALL:-}" ]; then
  recipe=:tiny network=tiny sizes='--rounds=1 --steps=1 --batch=2 --side=32'
  repeats=1 batches=8,16 target=cpu:1 members='--members=2 --steps=6 --rounds=1'
  fast='--config=configs/cifar10_fast.py:tiny --config.data.source=digits' runs=2
  digits=--config=configs/lenet.py seeds=0 examples=512 platform=cpu
fi
config="--config=configs/resnet_anp.py$recipe"
images="--config.data.source=synthetic --config.batch_size=${batches#*,}"
slow='(),((0,5.0),),((0,3.0),(1,3.0),(2,3.0),(3,3.0))'
often="--config.eval.every=$((examples / 8))examples --config.checkpoint.every=${examples}examples"

parts() {
  cat <<END
resnet50 scripts.bench.step --cases=$network --peers=flax,torch_eager $sizes
start scripts.bench.start --recipes=$recipe --repeats=$repeats $images
efficientnet scripts.bench.step --cases=efficientnet_b0_gpu --peers=torch_eager $sizes
convnext scripts.bench.step --cases=convnext_tiny_gpu --peers=torch_eager $sizes
augment scripts.bench.step --cases=convnext_tiny_gpu --peers=strong_crop $sizes
compiled scripts.bench.step --cases=$network --peers=torch_compile $sizes
resume scripts.bench.resume $config
restart scripts.bench.once.restart --case=$network
ensemble scripts.bench.ensemble $members
cifar10 anp_jax $fast --config.ensemble.seeds=0:$runs --config.eval.every=16epochs --config.checkpoint.every=16epochs --workdir=$out/cifar10
plan anp_jax.tools.plan $config $images --measure --measure_batches=$batches
benchmark anp_jax $config $images --mode=benchmark --workdir=$out/benchmark
portability anp_jax.tools.portability $config $images --target=$target
methods anp_jax.tools.study strategies $digits --workdir=$out/methods --seeds=$seeds --workers=8 --strategies=configs/methods_mnist.toml --simulate=step_seconds=1,spread=0.2 --vary=strategy.simulate.slow=$slow --target_accuracy=0.98 --config.duration=${examples}examples $often --config.eval.examples=False --config.log.tensorboard=False
END
}

if [ "${1:-}" = --list ]; then
  parts | sed 's/^\([^ ]*\)/\1: python -m/'
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
  begin=$SECONDS log=$out/$name.log json=$out/$name.json
  # Runs of simulated workers, whose own speed is not measured, would take the CPU.
  [ "$name" = methods ] && export JAX_PLATFORMS=$platform
  # A command's words have no spaces in them.
  timeout --kill-after=5 "$limit" "$python" -m $command >"$log" 2>&1 </dev/null
  case $? in
    0) ending=done ;;
    124 | 137) ending="stopped after $limit s" ;;
    *) ending="failed: $(grep -v "^{" "$log" | tail -n 1 | cut -c -90)" ;;
  esac
  [ "$ending" = done ] || failed=1
  grep '^{' "$log" | tail -n 1 >"$json"
  [ -s "$json" ] || cat "$out/$name/"{benchmark,ensemble}.json >"$json" 2>/dev/null
  [ -s "$json" ] || rm -f "$json"
  line=$(printf '%-13s %4d s  %s' "$name" $((SECONDS - begin)) "$ending")
  echo "$line"
  summary+="$line"$'\n'
done < <(parts)
printf '\n%s' "$summary" | tee "$out/summary.txt"
exit $failed
