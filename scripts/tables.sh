#!/usr/bin/env bash
# Makes the tables of docs/accuracy.md and docs/log.md again, by the commands that
# results/strategies.csv names, hours of computing in all. Rows whose commands name a
# commit need that commit.
#
#   scripts/tables.sh --list       the parts and their commands
#   scripts/tables.sh [PART...]    runs all of them, or these; a part that was stopped goes on
#
# OUT=DIR (runs/tables) gets PART.log and PART/study.md, the page of the part.
# PYTHON names the interpreter, MNIST the folder of its four files, CIFAR10 that of its
# batches, or of a tree of images, train/CLASS and a second one to test with. SEEDS=0,1
# are other seeds; JAX_PLATFORMS=cuda computes on a GPU; SMALL=1 has tiny sizes.
set -uo pipefail
cd "$(dirname "$(readlink -f "$0")")/.." || exit 2
out=${OUT:-runs/tables}
limit=0
cifar10=${CIFAR10:-CIFAR10}
tree=$cifar10
[ -d "$tree/train" ] && cifar10=$out/cifar10.npz

three=${SEEDS:-0,1,2} five=${SEEDS:-0,1,2,3,4} eight=${SEEDS:-0,1,2,3,4,5,6,7}
lenet="--config=configs/lenet.py:mnist --config.data.source=arrays --config.data.path=${MNIST:-MNIST}"
pixels="--config.data.source=arrays --config.data.path=$cifar10"
full=configs/cifar10_full.py:cifar10 resnet=configs/resnet_cifar10.py
half=32000examples early=4000examples finely=2000examples warmup=6400examples four=4epochs sixteen=16epochs epoch=1epochs often=15000examples
grid=0.0003,0.001,0.003,0.01,0.03
if [ "${SMALL:-}" ]; then
  three=0 five=0 eight=0 lenet=--config=configs/lenet.py pixels= full=configs/cifar10_full.py resnet=configs/resnet_cifar10.py:tiny
  half=512examples early=256examples finely=256examples warmup=64examples four=512examples sixteen=512examples epoch=256examples often=256examples
  grid=0.001,0.003
fi
study='anp_jax.tools.study strategies'
equal=--simulate=step_seconds=1,spread=0.2
slow='((0,5.0),),((0,3.0),(1,3.0),(2,3.0),(3,3.0))'
methods="$lenet --workers=8 --strategies=configs/methods_mnist.toml"
whole="--config.duration=$four --config.eval.every=$often --target_accuracy=0.98"
begin="--config.duration=$half --config.eval.every=$finely --target_accuracy=0.9,0.95"
spread=--simulate=step_seconds=1,spread=1
outages=--simulate=step_seconds=1,spread=0.2,outage_chance=0.01,outage_seconds=60
early="--config.duration=$half --config.eval.every=$early"
workers="$lenet --seeds=$three --strategies=configs/workers_mnist.toml $equal --tune=optimizer.learning_rate=$grid $early"
dana='--strategies=parameter_server --vary=strategy.look_ahead=dana'
weak="$equal --scaling=weak --config.batch_size=16 --config.schedule.warmup=$epoch"
converged="$lenet --seeds=$three $equal $whole --config.schedule.warmup=$epoch"
nodes="$lenet --seeds=$three --target_accuracy=0.98 --scaling=weak --config.batch_size=15 --config.duration=$four"
sixteen_nodes="$nodes --workers=16 --simulate=step_seconds=0.02,image_seconds=0.002,spread=0.1,slow=3:3"
cosine="--config.schedule.name=cosine --config.eval.every=$epoch"
plain='--config.optimizer.decay_multipliers=() --config.optimizer.multipliers=()'
cifar="--config=$full $pixels $plain $weak $cosine"
short="$cifar --config.duration=$four"
long="$cifar --config.duration=$sixteen --seeds=$three --workers=4"
deep="--config=$resnet $pixels --config.model.norm_group=16 $weak $cosine --config.duration=$four --seeds=$three"
rate=--config.optimizer.learning_rate
local8='--strategies=local_sgd --config.strategy.period=8'

parts() {
  cat <<END
methods $study $methods --workdir=$out/methods --seeds=$eight $equal $whole
slow $study $methods --workdir=$out/slow --seeds=$three $equal --vary=strategy.simulate.slow=$slow $whole
spread $study $methods --workdir=$out/spread --seeds=$three $spread $whole
outages $study $methods --workdir=$out/outages --seeds=$three $outages $whole
early $study $methods --workdir=$out/early --seeds=$three $equal --vary=strategy.simulate.slow=(),$slow $begin
early_spread $study $methods --workdir=$out/early_spread --seeds=$three $spread $begin
early_outages $study $methods --workdir=$out/early_outages --seeds=$three $outages $begin
workers $study $workers --workdir=$out/workers --workers=16,32
workers_warm $study $workers --workdir=$out/workers_warm --workers=16,32 --config.schedule.warmup=$warmup
workers_64 $study $workers --workdir=$out/workers_64 --workers=64
converged $study $converged --workdir=$out/converged --strategies=sync --workers=16 --config.batch_size=128 $rate=0.03
converged_local $study $converged --workdir=$out/converged_local $local8 --workers=16,32,64 --config.batch_size=128 $rate=0.01
converged_16 $study $converged --workdir=$out/converged_16 $dana --workers=16 --config.batch_size=16 $rate=0.003
converged_32 $study $converged --workdir=$out/converged_32 $dana --workers=32 --config.batch_size=16 $rate=0.001
converged_64 $study $converged --workdir=$out/converged_64 $dana --workers=64 --config.batch_size=16 $rate=0.0003
nodes $study $sixteen_nodes --workdir=$out/nodes --config.schedule.warmup=$epoch --config.schedule.name=cosine --config.eval.every=$often --strategies=sync,local_sgd --config.strategy.period=8 --tune=optimizer.learning_rate=0.0005,0.002,0.008,0.032
nodes_backup $study $sixteen_nodes --workdir=$out/nodes_backup --strategies=parameter_server --config.strategy.mode=synchronous --config.strategy.backup_workers=1 $rate=0.032
nodes_one $study $nodes --workdir=$out/nodes_one --nodes=1 --config.schedule.warmup=$epoch --config.schedule.name=cosine --config.eval.every=$often --strategies=sync --vary=optimizer.learning_rate=0.002,0.008
cifar10_sync $study $short --workdir=$out/cifar10_sync --seeds=$five --workers=4,8,16,32 --strategies=sync $rate=0.003
cifar10_dana $study $short --workdir=$out/cifar10_dana --seeds=$five --workers=4,8 $dana $rate=0.001
cifar10_dana_16 $study $short --workdir=$out/cifar10_dana_16 --seeds=$five --workers=16 $dana $rate=0.0003
cifar10_dana_32 $study $short --workdir=$out/cifar10_dana_32 --seeds=$five --workers=32 $dana $rate=0.0001
cifar10_local_8 $study $short --workdir=$out/cifar10_local_8 --seeds=$five --workers=4 $local8 $rate=0.003
cifar10_local_32 $study $short --workdir=$out/cifar10_local_32 --seeds=$five --workers=4 --strategies=local_sgd --config.strategy.period=32 $rate=0.001
cifar10_averaged_8 $study $short --workdir=$out/cifar10_averaged_8 --seeds=$five --workers=4 $local8 --config.strategy.moments=average $rate=0.003
cifar10_averaged_2 $study $short --workdir=$out/cifar10_averaged_2 --seeds=$three --workers=4 --strategies=local_sgd --config.strategy.period=2 --config.strategy.moments=average $rate=0.003
sixteen_sync $study $long --workdir=$out/sixteen_sync --strategies=sync $rate=0.003
sixteen_dana $study $long --workdir=$out/sixteen_dana $dana $rate=0.001
sixteen_averaged $study $long --workdir=$out/sixteen_averaged $local8 --config.strategy.moments=average $rate=0.003
resnet20_sync $study $deep --workdir=$out/resnet20_sync --workers=4 --strategies=sync $rate=0.15
resnet20_dana $study $deep --workdir=$out/resnet20_dana --workers=4 $dana $rate=0.06
resnet20_dana_8 $study $deep --workdir=$out/resnet20_dana_8 --workers=8 $dana $rate=0.02
resnet20_local_8 $study $deep --workdir=$out/resnet20_local_8 --workers=4 $local8 $rate=0.05
END
}

. scripts/parts.sh
