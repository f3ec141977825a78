"""Workloads that are timed: steps, convolutions and collectives.

Each function compiles for JAX's default device, unless told otherwise, and
returns a function without arguments that ends when its results exist.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import ml_collections
import numpy as np

from anp_jax import config as config_lib
from anp_jax.parallel import mesh as mesh_lib
from anp_jax.parallel.channel_split import convolutions
from anp_jax.runtimes.offload import device as device_lib
from anp_jax.training import build, run_spec


def unsplit(spec: run_spec.RunSpec, device: jax.Device) -> run_spec.RunSpec:
  """Returns the run on one device of this process, with nothing split."""
  changes = {'strategy.name': 'sync', 'mesh.data': 1, 'mesh.model': 1}
  config = config_lib.replaced(spec.config, changes)
  mesh = mesh_lib.create(config, [device])
  return dataclasses.replace(spec, config=config, mesh=mesh, offload_devices=())


def step(
  program: build.ModelAndSteps,
  spec: run_spec.RunSpec,
  rows: int,
  batches: Iterator[dict[str, jax.Array]] | None = None,
) -> Callable:
  """Returns a function (steps=1) that trains as many steps and waits for the last.

  Args:
    program: model and steps of the run.
    spec: spec of the run.
    rows: images of the batch.
    batches: batches of the steps; None: noise, the same in all of them.
  """
  state = [program.new_state()]
  batches = batches or itertools.repeat(images(spec, rows))
  train_step: Any = program.train_step  # jitted
  compiled = train_step.lower(state[0], next(batches)).compile()

  def run(steps=1):
    for _ in range(steps):
      state[0], values = compiled(state[0], next(batches))
    jax.block_until_ready(values)

  return run


def images(spec: run_spec.RunSpec, rows: int) -> dict[str, jax.Array]:
  """Returns a batch of noise on the run's mesh."""
  batch = {
    name: np.zeros(array.shape, array.dtype)
    for name, array in build.abstract_batch(spec.config, spec.mesh, rows).items()
  }
  image = batch['image']
  batch['image'] = np.random.default_rng(0).integers(0, 256, image.shape).astype(image.dtype)
  batch['row'] = np.arange(rows, dtype=np.int32)
  batch['weight'] += 1
  sharding = mesh_lib.batch_sharding(spec.mesh)
  return {
    name: jax.make_array_from_callback(x.shape, sharding, lambda index, x=x: x[index])
    for name, x in batch.items()
  }


def operands(call: convolutions.Call) -> list[jax.Array]:
  """Returns noise for x, kernel and dy of a convolution."""
  return [jnp.asarray(x) for x in _noise(call.x, call.kernel, call.y)]


def convolution(
  call: convolutions.Call, count: int, split: bool, arrays: list[jax.Array]
) -> Callable:
  """Returns the forward and backward pass of some features of a convolution.

  A split layer is computed as in `channel_split.split_operation`: in a branch, with
  the features cut out of the kernel, and their gradient padded.

  Args:
    call: convolution of the network.
    count: number of features that are computed.
    split: whether the layer is split; else count is all features.
    arrays: operands, from `operands`.
  """

  def compute(x, kernel, dy):
    y, pull = jax.vjp(call.convolve, x, kernel)
    dx, dkernel = pull(dy)
    return (y, dkernel) if call.reads_images else (y, dx, dkernel)

  def compute_part(x, kernel, dy):
    y, *dx, dkernel = compute(x, kernel[..., :count], dy[..., :count])
    after = kernel.shape[-1] - count
    padding = ((0, 0),) * (dkernel.ndim - 1) + ((0, after),)
    return y, *dx, jnp.pad(dkernel, padding)

  def branch(choice, *arguments):
    shapes = jax.eval_shape(compute_part, *arguments)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return lax.switch(choice, [compute_part, lambda *_: zeros], *arguments)

  function, arguments = compute, arrays
  if split:
    function, arguments = branch, [jnp.zeros((), jnp.int32), *arrays]
  compiled = jax.jit(function).lower(*arguments).compile()
  return lambda: jax.block_until_ready(compiled(*arguments))


def offloaded_convolution(call: convolutions.Call, count: int, device: Any) -> Callable:
  """Returns the passes of some features on an offload device, with the transfers.

  Args:
    call: convolution of the network.
    count: number of features of the device.
    device: `offload.device.LocalDevice` or another with its methods.
  """
  shapes = call.x, call.kernel, call.y
  task = device_lib.Task.create(call.convolve, *shapes, count)
  x, kernel, dy = _noise(task.x, task.kernel, task.y)

  def run():
    device.forward(task, x, kernel, True).result()
    # The device computes in order: the kernel's gradient ends last.
    device.backward(task, dy, not call.reads_images)[1].result()

  return run


def gradient_bytes(config: ml_collections.ConfigDict) -> int:
  """Returns the bytes of a gradient's number as it is sent; float64 is not narrowed."""
  is_wide = config.model.param_dtype == 'float64'
  return jnp.dtype('float64' if is_wide else config.strategy.reduce_dtype).itemsize


def collective(name: str, mesh: jax.sharding.Mesh, axis: str, size: int) -> tuple[int, Callable]:
  """Returns a collective of float32 arrays.

  Args:
    name: 'gather' or 'total'.
    mesh: mesh of the run.
    axis: axis of the mesh.
    size: bytes that each device has in the end.

  Returns:
    The bytes, rounded to whole rows, and the function.
  """
  function = {'gather': _gather, 'total': _total}[name]
  parts = mesh.shape[axis] if name == 'gather' else 1
  columns = max(size // 4 // parts // 64, 1)
  one_axis = functools.partial(function, axis=axis)
  mapped = jax.jit(mesh_lib.mapped(one_axis, mesh, mesh_lib.P(), mesh_lib.P()))
  zeros = jax.jit(
    lambda: jnp.zeros((64, columns), jnp.float32), out_shardings=mesh_lib.replicated(mesh)
  )()
  return (4 * 64 * columns * parts, lambda: jax.block_until_ready(mapped(zeros)))


def _gather(x, axis):
  return jnp.concatenate(list(lax.all_gather(x, axis)), -1)


def _total(x, axis):
  return lax.psum(x, axis)


def _noise(*shapes) -> list[np.ndarray]:
  random = np.random.default_rng(0)
  return [(random.random(s.shape, np.float32) - 0.5).astype(s.dtype) for s in shapes]
