#!/usr/bin/env bash
# Measures what needs an accelerator, in parts of less than three minutes, the
# most wanted first. docs/gpu.md says more.
#
#   scripts/accelerator.sh --list       the parts and their commands
#   scripts/accelerator.sh [PART...]    runs all of them, or these
#
# OUT=DIR (runs/accelerator) gets PART.log and, as each part ends, PART.json. A part that
# trains goes on where it was stopped when it is called again.
# PYTHON names the interpreter, MNIST the folder of its four files, CIFAR10 that of its
# batches, or of a tree of images, train/CLASS and a second one to test with.
# SMALL=1 has tiny sizes, which try the parts on a CPU.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 2
out=${OUT:-runs/accelerator}
limit=175  # seconds of a part
cifar10=${CIFAR10:-cifar10}
tree=$cifar10
[ -d "$tree/train" ] && cifar10=$out/cifar10.npz

recipe=:modern network=resnet50_gpu sizes='--rounds=6'
repeats=2 batches=128,256 target=gpu:h200:1x1 members='--members=16 --steps=2000 --rounds=1' runs=50 few=5
pixels="--config.data.source=arrays --config.data.path=$cifar10"
fast="--config=configs/cifar10_fast.py $pixels" full="--config=configs/cifar10_full.py:cifar10 $pixels"
deep=configs/resnet_cifar10.py deep_pixels=$pixels deep_members='--members=8 --steps=500 --rounds=1'
digits="--config=configs/lenet.py:mnist --config.data.source=arrays --config.data.path=${MNIST:-mnist}"
seeds=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15 examples=240000 epochs=800000 warmup=1epochs platform=cuda
if [ "${SMALL:-}" ]; then
  recipe=:tiny network=tiny sizes='--rounds=1 --steps=1 --batch=2 --side=32'
  repeats=1 batches=8,16 target=cpu:1 members='--members=2 --steps=6 --rounds=1' runs=2 few=2
  fast='--config=configs/cifar10_fast.py:tiny --config.data.source=digits' full=--config=configs/cifar10_full.py
  deep=configs/resnet_cifar10.py:tiny deep_pixels=--config.data.source=digits deep_members=$members
  digits=--config=configs/lenet.py seeds=0 examples=512 epochs=512 warmup=256examples platform=cpu
fi
config="--config=configs/resnet_anp.py$recipe"
images="--config.data.source=synthetic --config.batch_size=${batches#*,}"
slow='(),((0,5.0),),((0,3.0),(1,3.0),(2,3.0),(3,3.0))'
study="anp_jax.tools.study strategies --seeds=$seeds --target_accuracy=0.9,0.98 --config.eval.examples=False --config.log.tensorboard=False"
mnist="$digits --config.duration=${examples}examples --config.eval.every=$((examples / 8))examples --config.checkpoint.every=${examples}examples"
eight="$mnist --workers=8 --strategies=configs/methods_mnist.toml"

parts() {
  cat <<END
resnet50 scripts.bench.step --cases=$network --peers=flax,torch_eager $sizes
start scripts.bench.start --recipes=$recipe --repeats=$repeats $images
efficientnet scripts.bench.step --cases=efficientnet_b0_gpu --peers=torch_eager $sizes
convnext scripts.bench.step --cases=convnext_tiny_gpu --peers=torch_eager $sizes
augment scripts.bench.step --cases=convnext_tiny_gpu --peers=strong_crop $sizes
autotune scripts.bench.once.autotune --case=${network/resnet50/efficientnet_b0} --folder=$out/autotune
compiled scripts.bench.step --cases=$network --peers=torch_compile $sizes
flax_convnext scripts.bench.step --cases=convnext_tiny_gpu --peers=flax $sizes
flax_efficientnet scripts.bench.step --cases=efficientnet_b0_gpu --peers=flax $sizes
compiled_convnext scripts.bench.step --cases=convnext_tiny_gpu --peers=torch_compile $sizes
resume scripts.bench.resume $config
restart scripts.bench.once.restart --case=$network
ensemble scripts.bench.ensemble $members
cifar10 anp_jax $fast --config.ensemble.seeds=0:$runs --config.eval.every=16epochs --config.checkpoint.every=16epochs --workdir=$out/cifar10
plan anp_jax.tools.plan $config $images --measure --measure_batches=$batches
benchmark anp_jax $config $images --mode=benchmark --workdir=$out/benchmark
portability anp_jax.tools.portability $config $images --target=$target
methods $study $eight --workdir=$out/methods --simulate=step_seconds=1,spread=0.2 --vary=strategy.simulate.slow=$slow
spread $study $eight --workdir=$out/spread --simulate=step_seconds=1,spread=1
outages $study $eight --workdir=$out/outages --simulate=step_seconds=1,spread=0.2,outage_chance=0.01,outage_seconds=60
workers $study $mnist --workdir=$out/workers --workers=4,8,16,32,64 --strategies=configs/workers_mnist.toml --simulate=step_seconds=1,spread=0.2 --tune=optimizer.learning_rate=0.0003,0.001,0.003,0.01,0.03 --config.schedule.warmup=$warmup
cifar10_methods $study $full --workdir=$out/cifar10_methods --workers=8 --strategies=configs/methods_cifar10.toml --simulate=step_seconds=1,spread=0.2 --tune=optimizer.learning_rate=0.0003,0.001,0.003,0.01 --config.duration=${epochs}examples --config.eval.every=$((epochs / 16))examples --config.checkpoint.every=${epochs}examples --config.schedule.name=cosine --config.schedule.warmup=$warmup --config.optimizer.multipliers=() --config.optimizer.decay_multipliers=()
resnet20 anp_jax --config=$deep $deep_pixels --config.ensemble.seeds=0:$few --workdir=$out/resnet20
resnet56 anp_jax --config=$deep $deep_pixels --config.model.name=resnet56 --config.ensemble.seeds=0:$few --workdir=$out/resnet56
ensemble_resnet20 scripts.bench.ensemble --config=$deep $deep_members
END
}

. scripts/parts.sh
