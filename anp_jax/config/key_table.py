"""The keys of every config, each with its default, unit, reason and range.

The keys of one strategy are in its `default_config`; see `strategy.py`.
"""

import dataclasses

from anp_jax.config import data_keys, emulation_keys, networks, rules, strategy as strategy_lib
from anp_jax.config.keys import (
  ADDRESS,
  CLASS,
  FUNCTION,
  Key,
  decay,
  duration,
  flag,
  integer,
  milestones,
  number,
  numbers,
  share,
  text,
  value,
  window,
)
from anp_jax.config.optimizers import OPTIMIZERS

SCHEDULES = {
  'constant': (),
  'cosine': ('end',),
  'step': ('every', 'factor'),
  'exponential': ('every', 'factor'),
  'polynomial': ('end', 'power'),
  'range': ('start',),
}


def _check_strategy(_, name):
  strategy_lib.declared(name)


def _is_devices(count):
  return count == -1 or count > 0


def _is_head_weights(weights):
  good = len(weights) == 3 and all(rules.is_number(w) and w >= 0 for w in weights)
  return good and weights[0] > 0


def _arguments(key):
  words = "further arguments of what package.module:name names, pairs such as (('b2', 0.95),)"
  return Key((), words, check=rules.check_arguments, only_if=(key, ('*:*',)))


_DEVICES = 'a count of devices, or -1 for all that remain'
_MOST_IMAGES = 2**24  # of a batch: its pixels are in memory
_ALL = {
  'seed': integer(
    0,
    'seed of the initial weights, the shuffling and the augmentation',
    at_least=0,
    below=2**31,  # a JAX key is made of 32 bits; one is the sign's
  ),
  'duration': duration('10 epochs', 'run length', resumable=True),
  'batch_size': integer(
    64,
    'global batch size; 0: batch_size_per_device times the devices',
    at_least=0,
    at_most=_MOST_IMAGES,
  ),
  'batch_size_per_device': integer(
    32, 'batch size per device, used when batch_size is 0', at_least=0, at_most=_MOST_IMAGES
  ),
  'accumulate': integer(
    1, 'micro-batches per device and step, computed one after another', above=0
  ),
  'label_smoothing': share(0, 'share of the target probability spread over all classes'),
  'ema': share(
    0, 'decay of the exponential moving average of weights and batch statistics; 0: none'
  ),
  'time_limit': number(
    0,
    "wall-clock limit in minutes, then save and stop; 0: Slurm's own limit",
    at_least=0,
    resumable=True,
  ),
}
_RESNET = ('model.name', networks.RESNETS)
# A user's network may have batch norm too; its fields are its own.
_NORMALISED = ('model.name', (*networks.BATCH_NORMALISED, '*:*'))
_DROPS_PATHS = 'model.name', (*networks.CONVNEXTS, *networks.EFFICIENTNETS)
_MODEL = {
  'name': text(
    'resnet50',
    'network, built in or a class of yours, called with (images, train)',
    networks.MODELS,
    ADDRESS,
    CLASS,
  ),
  'arguments': _arguments('model.name'),
  'head': text(
    'joint',
    'classifier head: how outputs score pairs; see training/heads.py',
    ('joint', 'multitask', 'factored', 'bilinear'),
    ADDRESS,
    CLASS,
  ),
  'head_weights': value(
    (1.0, 0.5, 0.5),
    'loss weights of pair, adjective and noun',
    _is_head_weights,
    'three numbers, the first above 0 and none below',
    only_if=('model.head', ('multitask',)),
  ),
  'head_rank': integer(
    4,
    'products of adjective and noun whose sum a bilinear head adds to the factored logit',
    above=0,
    only_if=('model.head', ('bilinear',)),
  ),
  'version': text(
    'v1.5',
    "position of a bottleneck's stride: v1.5: 3x3 convolution, v1: first 1x1",
    ('v1.5', 'v1'),
    only_if=_RESNET,
  ),
  'kernels': numbers(
    (500, 1500),
    'output channels of the two layers',
    above=0,
    integers=True,
    only_if=('model.name', ('two_convolutions',)),
  ),
  'width': integer(
    64, 'channels of the first stage; resnet20, 32 and 56 usually have 16', above=0, only_if=_RESNET
  ),
  'dtype': text(
    'float32',
    'compute dtype; auto: bfloat16 where it is fast',
    ('auto', 'float32', 'bfloat16', 'float64'),
  ),
  'cpu_library': text(
    'auto',
    'library of convolutions on CPUs; auto: oneDNN where it is installed',
    ('auto', 'onednn', 'xla'),
  ),
  'param_dtype': text(
    'float32', 'dtype of parameters and batch statistics', ('float32', 'float64')
  ),
  'norm_group': integer(
    32, 'images that share batch statistics; 0: whole batch', at_least=0, only_if=_NORMALISED
  ),
  'norm_momentum': share(0.9, 'decay of the running batch statistics', only_if=_NORMALISED),
  'zero_init': flag(
    True, "zero initialization of the last norm's scale in each block", only_if=_RESNET
  ),
  'drop_path': decay(
    0,
    'stochastic depth: skip rate of the last block, linear from 0; EfficientNet: (n-1)/n of it',
    only_if=_DROPS_PATHS,
  ),
  'dropout': decay(
    0,
    "dropout probability before the classifier; of a CaffeNet after each hidden layer, Caffe's 0.5",
    only_if=('model.name', (*networks.EFFICIENTNETS, *networks.CAFFENETS)),
  ),
}
_INIT = {
  'from': text(
    '',
    'initial weights: a .safetensors, .pth or .caffemodel file, package:NAME, a '
    "run's workdir or checkpoint, or text:FILE, features of the classes' names; '': random; "
    'see docs/use.md',
  )
}
# At 1 a decay forgets nothing: sums grow for ever, and Adam's divide by 0.
_OPTIMIZER = {
  'name': text(
    'nesterov', 'optimizer, built in or a function of yours', tuple(OPTIMIZERS), ADDRESS, FUNCTION
  ),
  'arguments': _arguments('optimizer.name'),
  'learning_rate': number(0.05, 'peak learning rate of the schedule', at_least=0, changeable=True),
  'momentum': decay(0.9, 'momentum coefficient'),
  'decay': decay(0.9, 'RMSProp decay of the squared-gradient average'),
  'b1': decay(0.9, 'Adam decay of the gradient average'),
  'b2': decay(
    0.999, 'Adam decay of the squared-gradient average; Lion decay of the gradient average'
  ),
  'eps': number(1e-8, 'numerical epsilon; inside the square root for rmsprop', above=0),
  'weight_decay': number(
    5e-4,
    'weight decay of kernels; decoupled for adamw, lamb and lion, else an L2 penalty',
    at_least=0,
    changeable=True,
  ),
  'clip_norm': number(
    0, 'largest global norm of the gradient; 0: no limit', at_least=0, changeable=True
  ),
  'clip_value': number(
    0, "largest absolute value of a gradient's element; 0: no limit", at_least=0, changeable=True
  ),
  'multipliers': Key(
    (),
    "learning-rate multipliers: ordered (regex of the parameter's path, factor) pairs; "
    "the first match wins; no match: 1; 0 freezes, as in (('stem|stage1', 0),)",
    check=rules.check_multipliers,
  ),
  'layer_decay': number(
    1,
    'ratio of the learning rate of each block to that of the block above it; the head '
    'has the full rate',
    above=0,
    at_most=1,
    only_if=('init.from', ('?*',)),
  ),
  'decay_multipliers': Key(
    (),
    'weight-decay multipliers, written like multipliers; vectors have no weight decay',
    check=rules.check_multipliers,
  ),
}
_SCHEDULE = {
  'name': text(
    'cosine',
    'learning-rate schedule; range: for --mode=range_test',
    tuple(SCHEDULES),
    ADDRESS,
    FUNCTION,
  ),
  'warmup': duration('0 steps', 'linear warm-up from 0', zero=True),
  'every': milestones(
    '30 epochs', "interval between decays; '32000 steps, 48000 steps': only at those two"
  ),
  'factor': number(0.1, 'factor of each decay', above=0),
  'power': number(1, 'exponent of the remaining share of the run', above=0),
  'end': share(0, 'last learning rate over the peak'),
  'start': number(1e-6, 'first learning rate over the peak', above=0, at_most=1),
}
_STRATEGY = {
  'name': Key(
    'sync',
    'how training is spread over devices; see docs/strategies.md',
    f'one of {", ".join(strategy_lib.BUILT_IN)} or {CLASS}',
    _check_strategy,
  ),
  'reduce_dtype': text(
    'float32', 'dtype of the gradient all-reduce', ('float32', 'bfloat16', 'float64')
  ),
  'bucket_megabytes': number(
    25, 'gradient bucket size in MB; a bucket is reduced at once', above=0
  ),
}
_MESH = {
  'data': value(-1, 'devices that divide the batch', _is_devices, _DEVICES),
  'model': value(1, 'devices that divide the network', _is_devices, _DEVICES),
}
_SHARDING = {
  'sharding': Key(
    (('.*', 'replicate'),),
    "parameter sharding: ordered (regex of the parameter's path, rule) pairs; the first"
    ' match wins; replicate, or fsdp: divided over mesh.data',
    check=rules.check_sharding,
    resumable=True,
  )
}
_EVAL = {
  'every': duration('1 epochs', 'interval between evaluations'),
  'batch_size': integer(256, 'global batch size of evaluations', above=0),
  'examples': flag(True, 'per-example results of the last evaluation, for the report'),
}
_TOP = ('top1', 'top5', 'top10')
_METRICS = (
  *(f'anp_{top}' for top in _TOP),
  *('adjective_top1', 'noun_top1', 'loss'),
  *(f'class_{top}' for top in _TOP),
)
_CHECKPOINT = {
  'every': duration(
    '1 epochs', 'interval between saves; a run also saves at its end and when stopped'
  ),
  'keep': integer(2, 'number of newest checkpoints kept', above=0),
  'keep_best': integer(
    1, 'number of further checkpoints kept, with the best best_metric', at_least=0
  ),
  'best_metric': text(
    'anp_top1',
    'evaluation metric that ranks checkpoints; anp_top1 and class_top1 are the same',
    _METRICS,
  ),
}
_LOG = {
  'every': duration('20 steps', 'interval between log lines'),
  'tensorboard': flag(True, 'TensorBoard event files'),
  'wandb': text('', "Weights & Biases mode; '': none", ('', 'offline', 'online')),
}
_COMPILE_CACHE = {
  'dir': text(
    'auto',
    'folder of compiled programs; auto: $JAX_COMPILATION_CACHE_DIR/anp_jax, else a '
    "cache folder; '': off",
  ),
  'max_gigabytes': number(
    4, 'size limit in GB; the least recently used programs are removed first', at_least=0
  ),
}
_CLUSTER = {
  'rendezvous_timeout': number(
    300, 'seconds until all processes have met, and again until JAX is up in all', above=0
  ),
  # Signs of life come once a second.
  'heartbeat_timeout': number(
    20, 'seconds of silence after which a process counts as lost', at_least=3
  ),
  'stall_timeout': number(
    120, 'seconds per step after which all processes end; 0: no watchdog', at_least=0
  ),
  'stop_timeout': number(
    60,
    'seconds from a signal to a finished save, after which the run ends without it; 0: no limit',
    at_least=0,
  ),
  'elastic': text(
    'auto',
    'auto: a run in which all devices compute each step together goes on in place without a '
    'process that is lost; off: all processes end',
    ('auto', 'off'),
  ),
  'min_processes': integer(
    1, 'number of processes below which an elastic run ends instead of going on', at_least=1
  ),
  'mirror_every': integer(
    0,
    "steps between two copies of the state in the hosts' memory, from which an elastic run goes "
    'on; 0: as often as costs 1 % of the time',
    at_least=0,
  ),
}
_ENSEMBLE = {
  'seeds': window(
    '',
    "seeds of trainings that one process makes together, 'first:last' with last excluded, such "
    "as '0:16'; '': one training, with config.seed",
    least=0,
  ),
  'together': integer(
    0,
    'trainings that one program computes at once; 0: as many as an accelerator has memory for, '
    'one on a CPU',
    at_least=0,
    only_if=('ensemble.seeds', ('?*',)),
  ),
}
_PROFILE = {'steps': window('', "steps to trace, 'first:last' with last excluded, such as '10:15'")}


def _group(name, keys, **fields):
  """The keys of a group, by dotted key, with fields that they share."""
  return {f'{name}.{leaf}': dataclasses.replace(key, **fields) for leaf, key in keys.items()}


def _chosen(name, keys, leaves, **fields):
  """The keys of a group; a key may apply with some values of its `name` alone.

  Args:
    name: group.
    keys: keys by leaf.
    leaves: leaves of these keys, by value of `name`.
    **fields: fields that the keys share.
  """
  keys = _group(name, keys, **fields)
  for leaf in set().union(*leaves.values()):
    users = tuple(choice for choice in leaves if leaf in leaves[choice])
    key = f'{name}.{leaf}'
    keys[key] = dataclasses.replace(keys[key], only_if=(f'{name}.name', users))
  return keys


# By dotted key.
KEYS = {
  **_ALL,
  **_group('data', data_keys.KEYS),
  **_group('model', _MODEL),
  **_group('init', _INIT),
  **_chosen('optimizer', _OPTIMIZER, {name: o.keys for name, o in OPTIMIZERS.items()}),
  **_chosen('schedule', _SCHEDULE, SCHEDULES, changeable=True),
  **_group('strategy', _STRATEGY),
  **_group('mesh', _MESH, resumable=True),
  **_SHARDING,
  **_group('eval', _EVAL, resumable=True),
  **_group('checkpoint', _CHECKPOINT, resumable=True),
  **_group('log', _LOG, resumable=True),
  **_group('compile_cache', _COMPILE_CACHE, resumable=True),
  **_group('cluster', _CLUSTER, resumable=True),
  **_group('ensemble', _ENSEMBLE),
  **_group('profile', _PROFILE, resumable=True),
  **_group('emulate', emulation_keys.KEYS),
}
