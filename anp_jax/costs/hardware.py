"""A device and a link, as data sheets describe them."""

from collections.abc import Mapping
import dataclasses

from anp_jax import config as config_lib


@dataclasses.dataclass(frozen=True)
class Device:
  """A device, from its data sheet.

  Attributes:
    name: name in the table.
    kind: 'tensor', 'vector', 'tpu' or 'cpu'; devices of one kind reach similar
      shares of their peaks.
    year: year of introduction.
    tflops: dense peak TFLOP/s by dtype.
    gigabytes: size of the memory.
    gigabytes_per_second: bandwidth of the memory.
    node_link: name of the link between devices of a node.
    host_cores: CPU cores per device of a usual host.
    aliases: regular expression for JAX's names of it.
    source: where the numbers are published.
  """

  name: str
  kind: str
  year: int
  tflops: Mapping[str, float]
  gigabytes: float
  gigabytes_per_second: float
  node_link: str
  host_cores: float
  source: str
  aliases: str = ''

  def peak(self, dtype: str) -> float:
    """The peak FLOP/s in a dtype; one half precision may stand for the other.

    Raises:
      ConfigError: if the entry lacks the dtype.
    """
    half = ('bfloat16', 'float16')
    names = (dtype, *half) if dtype in half else (dtype,)
    rates = [self.tflops[n] for n in names if n in self.tflops]
    if not rates:
      raise config_lib.ConfigError(
        f'device {self.name!r} has no peak for config.model.dtype={dtype!r} '
        f'(has: {", ".join(self.tflops)})'
        f'{config_lib.nearest(dtype, self.tflops)}'
      )
    return rates[0] * 1e12

  def effective_kind(self, dtype: str) -> str:
    """The kind of the units that compute in a dtype."""
    # Vector units compute in dtypes that the matrix units lack.
    is_slow = self.peak(dtype) < max(self.tflops.values()) * 1e12 / 3
    return 'vector' if self.kind == 'tensor' and is_slow else self.kind


@dataclasses.dataclass(frozen=True)
class Link:
  """A link of a device, or the ports of a node.

  Attributes:
    name: name in the table, with the number of ports.
    bandwidth: bytes per second in each direction, over all ports.
    latency: seconds of a step of a ring or tree.
    topology: 'ring' or 'torus'.
    axes: number of axes of a torus.
    is_shared: whether a node's devices share the link.
  """

  name: str
  bandwidth: float
  latency: float
  topology: str = 'ring'
  axes: int = 2
  is_shared: bool = False
