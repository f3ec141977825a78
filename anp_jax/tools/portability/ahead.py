"""A config's training and evaluation step, compiled for a target."""

import functools
import os
import time

import jax
import ml_collections

from anp_jax import experiment
from anp_jax.data import sources
from anp_jax.data.input import stream as stream_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.system import compute_dtype, flops
from anp_jax.tools.portability import compiled_collectives, portability_table, targets
from anp_jax.training import build

_MEMORY = {
  'arguments': 'argument_size_in_bytes',
  'results': 'output_size_in_bytes',
  'in_place': 'alias_size_in_bytes',
  'temporary': 'temp_size_in_bytes',
}


def inspect(config: ml_collections.ConfigDict, target: targets.Target, folder: str = '') -> dict:
  """Compiles the steps that a run of the config on the target would take.

  Args:
    config: resolved config; config.batch_size=0 is per device, as in training.
    target: target to compile for.
    folder: folder for the programs' texts; '': they are not written.

  Returns:
    `device`, the kind's name; `devices`; number of `parameters`;
    `named_dtype` of the gradients' sums; and for 'train' and 'eval' what `_compile` returns, for
    'train' with the dtypes `gradients_asked` and `gradients_compiled`.

  Raises:
    ConfigError: if the config does not fit the devices.
    targets.CompilerMissingError: if the target's plugin is not installed.
    RuntimeError: if the plugin knows no such topology.
  """
  config = compute_dtype.decide(config, '', target.platform)
  opened = experiment.open(config, list(targets.devices(target)))
  config, mesh, program = opened.config, opened.mesh, opened.program
  report = {
    'device': mesh.devices.flat[0].device_kind,
    'devices': mesh.size,
    'parameters': sum(s.size for s in jax.tree.leaves(program.abstract_replica.params)),
    'named_dtype': config.strategy.reduce_dtype,
  }
  batch = build.abstract_batch(config, mesh, opened.spec.array_rows)

  def compile_as(step, function, *arguments):
    keep = functools.partial(_keep, folder, f'{target.text}-{step}')
    return _compile(function, arguments, keep)

  report['train'] = train = compile_as('train', program.train_step, program.abstract_state, batch)
  # All that JAX asks to be summed, less the gradients.
  summed = sum(compiled_collectives.sums(train['asked']).values())
  alone = mesh.shape[mesh_lib.DATA] == 1
  rest = summed if alone else summed - report['parameters']
  for text in ('asked', 'compiled'):
    if text in train:
      train[f'gradients_{text}'] = compiled_collectives.gradient_dtypes(train[text], rest)
  examples = len(sources.open_source(config, training=False))
  size = stream_lib.evaluation_batch(config, examples, mesh.size)
  batch = build.abstract_batch(config, mesh, size)
  evaluated = program.abstract_replica.evaluated()
  report['eval'] = compile_as('eval', program.eval_step, *evaluated, batch)
  return report


def _compile(function, arguments, keep) -> dict:
  """Compiles a jitted function for abstract arguments.

  Args:
    function: jitted function, whose last argument is a batch.
    arguments: pytrees of jax.ShapeDtypeStruct, with shardings.
    keep: called with the ending of a file's name and a program's text.

  Returns:
    `images` of a batch; `flops` of one device's products; `asked` and
    `compiled`, the collectives of `compiled_collectives.totals`; `memory` of one device
    in bytes; `seconds` of compiling; or, where XLA refuses, `why_not`.
  """
  *_, batch = arguments
  lowered = function.lower(*arguments)
  text = lowered.as_text()
  keep('.mlir', text)
  report = {
    'images': batch['image'].shape[0],
    'flops': flops.count_call(function, *arguments),
    'asked': compiled_collectives.totals(compiled_collectives.asked(text)),
  }
  start = time.monotonic()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as e:  # such as out of memory
    return report | {'why_not': portability_table.one_line(e)}
  report['seconds'] = round(time.monotonic() - start, 1)
  text = compiled.as_text()
  keep('.hlo', text)
  report['compiled'] = compiled_collectives.totals(compiled_collectives.compiled(text))
  sizes = compiled.memory_analysis()
  memory = {name: getattr(sizes, key) for name, key in _MEMORY.items()}
  # An array that is updated in place is an argument and a result, but exists once.
  memory['together'] = (
    memory['arguments'] + memory['results'] - memory['in_place'] + memory['temporary']
  )
  return report | {'memory': memory}


def _keep(folder, name, ending, text):
  if folder:
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, name.replace(':', '-') + ending)
    with open(path, 'w') as f:
      f.write(text)
