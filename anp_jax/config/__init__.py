"""Configs: the base with every key, durations, golden text.

Nothing heavy is imported here: a typing mistake is answered in well under a
second. A config file is Python with `get_config(variant='') -> ConfigDict`; it
starts from `base()` and says only what differs.
"""

import difflib
import json
import math
import os
import re

import ml_collections


class ConfigError(ValueError):
  """A config, flag or workdir the run cannot start with; one clear line."""


# The keys that may differ when a run is resumed: where, how long, how often.
# Everything else must equal what the checkpoint was made with. A new duration
# also moves a schedule that ends with the run (cosine, polynomial).
RESUMABLE = (
  'duration',
  'checkpoint',
  'eval',
  'log',
  'mesh',
  'sharding',
  'data.dir',
  'data.path',
  'data.lists',
  'data.pairs',  # the classes themselves are compared
  'data.eval_split',
  'data.prefetch',
  'data.cache_gigabytes',
  'data.max_damaged',
  'data.threads',
  'compile_cache',
  'profile',
  'cluster',
  'time_limit',
)

# Of an image: TensorFlow decodes no more, 2 ** 29 bytes of three channels.
MOST_MEGAPIXELS = 178.9

_UNITS = ('steps', 'epochs', 'examples')
_WINDOW = re.compile(r'([0-9]{1,18}):([0-9]{1,18})')
_DURATION = re.compile(r'\s*([0-9]+(?:\.[0-9]*)?(?:e[0-9]+)?)\s*([a-z]+)\s*')


def base() -> ml_collections.ConfigDict:
  """Every key with its default; a recipe overrides what differs.

  Durations are texts with a unit: '90 epochs', '1000 steps', '2e6 examples'.
  """
  c = ml_collections.ConfigDict()
  c.seed = 0  # of the weights, the order of the data and all augmentation
  c.duration = '10 epochs'  # of the whole run
  c.batch_size = 64  # images a step over all devices; 0: per device x devices
  c.batch_size_per_device = 32  # images; used when batch_size is 0
  c.accumulate = 1  # micro-batches a device computes one after another
  c.label_smoothing = 0.0  # share of the target spread over all classes
  c.ema = 0.0  # decay of the averaged weights and statistics; 0: none
  c.time_limit = (
    0.0  # minutes of wall clock, then save and stop; 0: Slurm's own
  )

  c.data = d = ml_collections.ConfigDict()
  d.source = 'anp_shapes'  # or folder, tfds:NAME, arrays, digits, synthetic
  d.dir = ''  # where sets are built; '': $ANP_DATA, else a cache folder
  d.path = ''  # of the sources folder and arrays, see docs/data.md
  d.lists = ''  # 'ANPS.txt[,ADJECTIVES.txt,NOUNS.txt]': ids by line, for folder
  d.pairs = 'auto'  # classes are adjective_noun; auto: if parts recur; yes; no
  d.train_split = 'train'  # or, for folder, a split file (.txt)
  d.eval_split = 'validation'
  d.image_size = 64  # pixels a side that the network sees
  d.resize = 72  # pixels of the shorter side before the crop in evaluation
  d.augment = 'crop'  # crop: area and aspect; scale: shorter side; none
  d.crop_area = (0.35, 1.0)  # of the image, for augment=crop
  d.crop_ratio = (0.75, 4 / 3)  # width over height, for augment=crop
  d.scale_range = (256, 512)  # pixels of the shorter side, for augment=scale
  d.flip = 0.5  # probability of a horizontal flip
  d.mixup = 0.0  # alpha of the Beta distribution; 0: none
  d.cutmix = 0.0  # alpha; with both, each group of images takes one of them
  d.mean = (123.68, 116.78, 103.94)  # RGB, 0..255, subtracted on the device
  d.std = (58.4, 57.1, 57.4)  # RGB, 0..255, divided by on the device
  # fast: large JPEG crops at 1/2 to 1/8, area mean; exact: antialiased crops;
  # bilinear, bicubic: the whole image by Pillow's filter, as in transformers
  d.decode = 'fast'
  d.cache = 'none'  # encoded: files; decoded: images of `resize` px; in memory
  d.cache_gigabytes = 4.0  # that the cache of each split and process may take
  d.max_damaged = 0.01  # share of unreadable examples at which a run stops
  # Million pixels of an image; a larger one counts as damaged.
  d.max_megapixels = MOST_MEGAPIXELS
  d.prefetch = 2  # batches that wait on the device
  d.threads = 0  # decoding threads; 0: as many as cores
  d.held_out = ()  # pairs of which training shows no example, as ('red_car',)
  d.imbalance = 1.0  # largest class over smallest that training is cut to
  d.balance = 'none'  # sample: all classes equally often; weights: of the loss
  d.balance_power = 1.0  # of the classes' sizes in these weights; 0.5: the root
  d.synthetic_examples = 1280  # a split, for source=synthetic
  d.synthetic_classes = 1000

  c.model = m = ml_collections.ConfigDict()
  # resnet18 to resnet152, lenet, cifar10_full, two_convolutions, or
  # package.module:Class, called (images, train). All keys but the name, head,
  # head_weights, kernels and the two dtypes are the ResNets'.
  m.name = 'resnet50'
  m.head = 'joint'  # multitask, factored: how outputs name pairs; see heads.py
  m.head_weights = (1.0, 0.5, 0.5)  # of multitask's losses: pair, adj., noun
  m.version = 'v1.5'  # where a bottleneck strides: v1.5 3x3, v1 first 1x1
  m.kernels = (500, 1500)  # of the layers of two_convolutions
  m.width = 64  # channels of the first stage
  m.dtype = 'float32'  # of the computation; bfloat16 on accelerators
  m.param_dtype = 'float32'  # of parameters and statistics
  m.norm_group = 32  # images that share batch statistics; 0: whole batch
  m.norm_momentum = 0.9  # of the running statistics
  m.zero_init = True  # last scale of each block starts at zero

  c.init = i = ml_collections.ConfigDict()
  # What a new run begins with: .safetensors of a ResNet, or a run's workdir or
  # checkpoint; '': random weights. See docs/use.md.
  i['from'] = ''

  c.optimizer = o = ml_collections.ConfigDict()
  o.name = 'nesterov'
  o.learning_rate = 0.05  # at the peak of the schedule
  o.momentum = 0.9
  o.decay = 0.9  # of the squared gradient, for rmsprop
  o.beta1 = 0.9  # for adam, adamw, lamb
  o.beta2 = 0.999
  o.epsilon = 1e-8
  o.weight_decay = 5e-4  # of kernels only; in the gradient, or decoupled
  o.clip_norm = 0.0  # largest global norm of the gradient; 0: no limit
  o.clip_value = 0.0  # largest element of the gradient; 0: no limit
  # Ordered (regex of the parameter's path, factor of its learning rate) pairs;
  # the first match wins, none: 1. Of 0: frozen. As in (('stem|stage1', 0),).
  o.multipliers = ()

  c.schedule = s = ml_collections.ConfigDict()
  s.name = 'cosine'
  s.warmup = '0 steps'  # linear, from 0
  s.every = '30 epochs'  # between decays, for step and exponential
  s.factor = 0.1  # of each decay
  s.power = 1.0  # for polynomial
  s.end = 0.0  # last learning rate over the peak, for cosine and polynomial

  c.strategy = t = ml_collections.ConfigDict()
  t.name = 'sync'  # or another of docs/strategies.md
  t.reduce_dtype = 'float32'  # of the gradient sums between devices
  t.bucket_megabytes = 25.0  # of gradients that leave together
  t.logical_shards = 8  # of the batch, for invariant: a power of two
  t.threads = 2  # of a process's CPU pool, for invariant: they decide its bits
  # For local: groups of devices with weights of their own.
  t.groups = 2  # of neighbours; one device may also have several
  t.period = 8  # steps between exchanges
  t.exchange_probability = 0.0  # of an exchange after a step; 0: by period
  t.outer = 'average'  # what groups go on from; nesterov: DiLoCo's momentum
  t.outer_learning_rate = 0.7  # for nesterov; 1 without momentum: average
  t.outer_momentum = 0.9
  t.moments = 'keep'  # a group's optimizer state in an exchange; or average
  # For kernel_split: devices along mesh.model, each with some of the channels.
  # Also relay's stations, of the training set.
  t.shares = ()  # of each device, in proportion; (): measured; relay: all alike
  t.split_layers = '.*'  # regular expression: convolutions that may be split
  t.plan = ''  # as 'conv1=250,250; conv2=900,600', nothing or apart: by hand
  t.helpers = ()  # beside one device: 'cpu:0' of this process; 'processes'
  # For relay: models that go round, each with what differs from this config.
  t.models = ()  # as in ('seed=1', 'seed=2; model.width=32')
  t.station = 'device'  # what holds a part of the data; host: all of its own
  t.at_once = 0  # models in the ring; others follow those that leave; 0: all
  t.halving = 0  # after 1, h, h^2 .. epochs the best 1/h go on; 0: all do
  # For server: asynchronous workers and servers of the weights.
  t.servers = 1  # processes, the first ones, that each keep a slice of weights
  t.dedicated = False  # these processes do not train beside serving
  t.mode = 'async'  # bounded: in staleness; synchronous: updates of all workers
  t.max_staleness = 4  # updates between a gradient's reading and its use
  t.backup_workers = 0  # that a synchronous update does not wait for
  t.compensation = 'none'  # staleness: updates are divided by it
  t.weight_prediction = 0.0  # 1: workers' weights are ahead by the staleness
  t.wire_dtype = 'float32'  # of weights and gradients on their way
  t.lanes = 1  # tickets a worker has in hand; of 2, one computes, one travels
  t.ticket_timeout = 60.0  # seconds of a worker's silence; others take over
  t.bind = ''  # interface or address that servers listen on; '': the host's own
  t.tls_certificate = ''  # PEM file with the certificate of all servers
  t.tls_key = ''  # PEM file with its key; '' both: no encryption

  c.mesh = x = ml_collections.ConfigDict()
  x.data = -1  # devices that divide the batch; -1: all that remain
  x.model = 1  # devices that divide the network
  # Ordered (regex of the parameter's path, rule) pairs; the first match wins.
  c.sharding = (('.*', 'replicate'),)  # or fsdp: divided over mesh.data

  c.eval = e = ml_collections.ConfigDict()
  e.every = '1 epochs'
  e.batch_size = 256  # images over all devices
  e.examples = True  # the last one tells of each example, for the report

  c.checkpoint = k = ml_collections.ConfigDict()
  k.every = '1 epochs'  # also at the end and when stopped
  k.keep = 2  # newest
  k.keep_best = 1  # best by best_metric, after evaluations
  k.best_metric = 'anp_top1'  # or class_top1, which is the same
  k.on_error = 'stop'  # when one cannot be written (disk full); or continue

  c.log = g = ml_collections.ConfigDict()
  g.every = '20 steps'
  g.tensorboard = True
  g.wandb = ''  # Weights & Biases: offline, online; '': none

  c.compile_cache = p = ml_collections.ConfigDict()
  p.dir = 'auto'  # $JAX_COMPILATION_CACHE_DIR/anp_jax, else a cache; '': off
  p.max_gigabytes = 4.0  # the least recently used entries go first

  c.cluster = u = ml_collections.ConfigDict()  # seconds, all of them
  u.rendezvous_timeout = 300.0  # until all have come; until JAX is up in all
  u.heartbeat_timeout = 20.0  # of silence, after which a process is lost
  u.stall_timeout = 120.0  # of one step, then all end; 0: no watchdog
  u.stop_timeout = (
    60.0  # from a signal to a finished save, then without; 0: none
  )

  c.profile = f = ml_collections.ConfigDict()
  f.steps = ''  # 'first:last' of a trace, last not included, as in '10:15'
  return c


def nearest(name: str, valid) -> str:
  """The valid name nearest to `name`, as text for an error line."""
  valid = [str(v) for v in valid]
  found = difflib.get_close_matches(str(name), valid, n=1, cutoff=0.4)
  if not found:  # a leaf typed without its group, say: learning_rate
    tails = [v for v in valid if v.split('.')[-1] == str(name).split('.')[-1]]
    found = tails[:1]
  return f'; did you mean {found[0]!r}?' if found else ''


def flat(config) -> dict[str, object]:
  """The config as {dotted key: value}, tuples kept, in the file's order."""
  result = {}
  for key, value in config.items(preserve_field_references=False):
    if isinstance(value, ml_collections.ConfigDict):
      result.update({f'{key}.{k}': v for k, v in flat(value).items()})
    else:
      result[key] = value
  return result


def golden(config) -> str:
  """One line a key, sorted: what a golden file holds and a diff shows."""
  lines = [f'{k} = {v!r}' for k, v in sorted(flat(config).items())]
  return '\n'.join(lines) + '\n'


def to_json(config) -> str:
  """The resolved config as JSON text, one flat object."""
  return json.dumps(flat(config), indent=1)


def from_flat(saved: dict) -> ml_collections.ConfigDict:
  """The config of which `saved` is the `flat()`, after JSON.

  A key that it lacks has its default, and one that there is no more is left
  out; values are not checked, since its paths may be those of another machine.
  """
  config = base()
  for key in flat(config).keys() & saved.keys():
    put(config, key, _tuples(saved[key]))
  return config


def put(config, key: str, value) -> None:
  """Sets a dotted key."""
  *groups, leaf = key.split('.')
  for group in groups:
    config = config[group]
  config[leaf] = value


def variant(name: str, variants: dict) -> dict:
  """The overrides of variant `name`; '' is the plain recipe.

  Raises:
    ConfigError: for an unknown variant, with the nearest one.
  """
  if name and name not in variants:
    raise ConfigError(
      f'no variant {name!r} (have: {", ".join(variants)})'
      f'{nearest(name, variants)}'
    )
  return variants.get(name, {})


def steps(text: str, batch_size: int, examples: int) -> int:
  """Durations in one unit: steps, rounded up so that nothing is cut short.

  Args:
    text: a number and steps, epochs or examples ('1.5 epochs', '2e6 examples').
    batch_size: images a step.
    examples: images an epoch.

  Returns:
    Number of steps.

  Raises:
    ConfigError: if the text is not of that form.
  """
  match = _DURATION.fullmatch(str(text))
  unit = match and (match[2] if match[2].endswith('s') else match[2] + 's')
  if unit not in _UNITS or not math.isfinite(float(match[1])):
    word = match[2] if match else text
    raise ConfigError(
      f'{text!r} is not a duration: expected a number and a unit, such as '
      f"'10 epochs', '500 steps' or '1e6 examples'{nearest(word, _UNITS)}"
    )
  number = float(match[1])
  images = {'steps': batch_size, 'epochs': examples, 'examples': 1}[unit]
  # Rounded first: 0.1 x 30 must not become 4 steps by its last bit.
  return math.ceil(round(number * images / batch_size, 6))


def window(text: str) -> range:
  """The steps that 'first:last' names, last not included; none for ''.

  Raises:
    ConfigError: if the text is not of that form.
  """
  match = _WINDOW.fullmatch(text)
  if text and (not match or not 0 < int(match[1]) < int(match[2])):
    raise ConfigError(
      f"{text!r}: expected first:last, such as '10:15' for the steps 10 to 14 "
      '(the first step of a run is 1), or nothing'
    )
  return range(int(match[1]), int(match[2])) if match else range(0)


def difference(saved: dict, config, free: tuple[str, ...] = ()) -> str:
  """What keeps a checkpoint's config from being continued; '' if nothing.

  Args:
    saved: `flat()` of the run that wrote the checkpoint, after JSON.
    config: the config of this run.
    free: keys or groups that may differ beside RESUMABLE.

  Returns:
    One line that names the first key that differs and may not.
  """
  from anp_jax.config import strategy as strategy_lib

  have = json.loads(to_json(config))
  # How many threads there were, a run did not write down at first.
  if 'strategy.threads' not in saved:
    free = (*free, 'strategy.threads')
  # A key that came after the run began had its default there.
  saved = json.loads(to_json(base())) | saved
  strategy = strategy_lib.find(config)
  before = strategy_lib.by_name(saved['strategy.name'])
  # Those of the other strategy too: a run may go on with another one.
  strategy_keys = {
    f'strategy.{k}' for s in (before, strategy) for k in s.resumable
  }
  # Other keys follow from the weights that a run begins with.
  for key in sorted({*saved, *have}, key=lambda k: (k != 'init.from', k)):
    if any(key == r or key.startswith(r + '.') for r in (*RESUMABLE, *free)):
      continue
    if key in strategy_keys:
      continue
    if key == 'data.cache' and 'decoded' not in (saved.get(key), have.get(key)):
      continue  # the same files, from memory or not
    if key == 'strategy.name' and before.state == strategy.state:
      continue
    if saved.get(key) != have.get(key):
      return (
        f'config.{key} is {have.get(key)!r}, but the run in this workdir was '
        f'started with {saved.get(key)!r}'
      )
  return ''


def _tuples(value):
  """JSON has lists where a config has tuples."""
  return tuple(map(_tuples, value)) if isinstance(value, list) else value


def cache_dir() -> str:
  """The folder for what can be made again: data sets, compiled programs."""
  root = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
  return os.path.join(root, 'anp_jax')


def data_dir(config) -> str:
  """Where data sets live: config.data.dir, $ANP_DATA, a cache folder."""
  chosen = config.data.dir or os.environ.get('ANP_DATA')
  return os.path.expanduser(chosen or os.path.join(cache_dir(), 'data'))
