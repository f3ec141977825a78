"""What "did you mean" proposes, and where it is silent."""

import pytest

from anp_jax import config as config_lib
from anp_jax.config import recipes

_RECIPES = sorted(f'configs/{f.name}' for f in recipes.shipped().glob('*.py'))


@pytest.mark.parametrize(
  'name, valid, meant',
  [
    # Two of five letters are alike, or fewer.
    ('maybe', ('auto', 'yes', 'no'), ''),
    ('weeks', ('steps', 'epochs', 'examples'), ''),
    ('', ('a', 'b'), ''),
    ('x', ('xla', 'onednn'), ''),
    ('-', ('--config', '--workdir'), ''),
    # 6 of 10 letters of both, and 4 of 8, are alike.
    ('abcxx', ('abcyy',), 'abcyy'),
    ('abxx', ('abyy',), ''),
    # Names that go on from what was typed, before those that are more alike.
    ('configs/resnet.py', _RECIPES, 'configs/resnet_anp.py'),
    ('configs/resnet', _RECIPES, 'configs/resnet_anp.py'),
    ('resnet', ('lenet', 'resnet18', 'resnext50'), 'resnet18'),
    ('--check', ('--checks_all', '--checkpoint'), '--checks_all'),
    ('steps', ('stops', 'steps_of_run'), 'steps_of_run'),
    # Names of hardware are written in capital letters.
    ('4x XDR800', ('ib-ndr400', 'ib-xdr800', 'eth-400'), 'ib-xdr800'),
    ('MAYBE', ('auto', 'yes', 'no'), ''),
    # A key without its group.
    ('eps', ('seed', 'optimizer.eps', 'epochs'), 'optimizer.eps'),
    (5, (60, 'x'), ''),
    (55, (555, 'x'), '555'),
  ],
)
def test_the_nearest_name(name, valid, meant):
  text = f'; did you mean {meant!r}?' if meant else ''
  assert config_lib.nearest(name, valid) == text
