"""What is exported tells nothing of the machine that it was made on."""

import os
import pathlib
import sys

import jax
import pytest

from anp_jax.checkpoint.weights import exported, huggingface
from tests import exporting

pytestmark = pytest.mark.usefixtures('quick_compiles')


def test_no_file_tells_where_it_was_made(tmp_path):
  trained = exporting.trained('resnet18')
  huggingface.write(trained, tmp_path)
  names = exported.write(trained, str(tmp_path), ('cpu', 'cuda', 'tpu'))
  assert names[0] == 'model.stablehlo'
  places = {
    str(pathlib.Path(__file__).parents[2]),
    str(pathlib.Path.home()),
    sys.prefix,
    os.path.dirname(jax.__file__),
    os.getcwd(),
    '/anp_jax/',
    '.py',
  }
  files = list(tmp_path.iterdir())
  assert len(files) == 6
  for file in files:
    for place in places - {'/'}:
      assert place.encode() not in file.read_bytes(), (file.name, place)
  # It is JAX's setting of the export alone.
  assert jax.config.jax_include_full_tracebacks_in_locations
  assert jax.config.jax_hlo_source_file_canonicalization_regex is None
