"""Tests of mix: normalisation, mixup and cutmix on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from anp_jax.training import mixing

_KINDS = [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)]
_blend = jax.jit(mixing.blend, static_argnames=('mixup', 'cutmix'))


def _batch(pairs, height=6, width=5, dtype=np.float32):
  """Rows 2i are white and of class 0, rows 2i + 1 black and of class 1.

  So a blended row 2i shows its own share of each pixel.
  """
  images = np.zeros((2 * pairs, height, width, 3), dtype)
  images[::2] = 1
  targets = np.zeros((2 * pairs, 2), np.float32)
  targets[::2, 0] = targets[1::2, 1] = 1
  return jnp.asarray(images), jnp.asarray(targets), jnp.arange(2 * pairs)


def _shares(pairs, mixup, cutmix, seed=0, **shape):
  images, targets, rows = _batch(pairs, **shape)
  got = _blend(images, targets, rows, jax.random.key(seed), mixup=mixup, cutmix=cutmix)
  return np.asarray(got[0]), np.asarray(got[1])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_normalise(dtype):
  images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, 3)
  mean, std = (123.68, 116.78, 103.94), (58.4, 57.1, 57.4)
  got = mixing.normalise(jnp.asarray(images), mean, std, jnp.dtype(dtype))
  assert got.dtype == dtype and got.shape == images.shape
  want = (images.astype(np.float64) - mean) / std
  # float32: rounding of the mean, the difference and the quotient, on values
  # up to 256; bfloat16: one rounding to 8 bits of a float32 result.
  tolerance = {'float32': (1e-6, 5e-7), 'bfloat16': (2.0**-8, 1e-6)}[dtype]
  np.testing.assert_allclose(
    np.asarray(got, np.float64), want, rtol=tolerance[0], atol=tolerance[1]
  )


def test_nothing_asked_for_changes_nothing():
  images, targets, rows = _batch(3)
  got = mixing.blend(images, targets, rows, jax.random.key(0), 0.0, 0.0)
  assert got[0] is images and got[1] is targets


@pytest.mark.parametrize(
  'mixup, cutmix, dtype',
  [
    # One image in two is mixed, the others are cut.
    (*_KINDS[2], 'float32'),
    (*_KINDS[0], 'bfloat16'),
    *(pytest.param(*kind, 'float32', marks=pytest.mark.slow) for kind in _KINDS[:2]),
  ],
)
def test_targets_are_divided_as_the_pixels_are(mixup, cutmix, dtype):
  images, targets, rows = _batch(1000, dtype=jnp.dtype(dtype))
  images, targets = _blend(images, targets, rows, jax.random.key(1), mixup=mixup, cutmix=cutmix)
  assert images.dtype == dtype and targets.dtype == np.float32
  images, targets = np.asarray(images, np.float64), np.asarray(targets)
  # A mean of 30 float32 numbers is off by a few units of the last place.
  np.testing.assert_allclose(images[::2].mean((1, 2, 3)), targets[::2, 0], atol=1e-6)
  np.testing.assert_allclose(targets.sum(1), 1, atol=1e-6)
  # Partners share the same numbers: of 1 and 0 they make s and 1 - s. In
  # bfloat16 the two are rounded apart, by half a unit of 8 bits each.
  atol = 1e-6 if dtype == 'float32' else 2.0**-8
  np.testing.assert_allclose(images[::2] + images[1::2], 1, atol=atol)
  np.testing.assert_allclose(targets[::2, 0], targets[1::2, 1], atol=1e-6)
  assert len(np.unique(targets[::2, 0])) > 10  # every pair has its own


@pytest.mark.slow
@pytest.mark.parametrize('mixup, cutmix', _KINDS[2:])
def test_blend_is_a_convex_combination_of_partners(mixup, cutmix):
  """On random images, with the shares that white and black rows show."""
  rng = np.random.default_rng(0)
  blended, shares = _shares(16, mixup, cutmix)
  original = blended.copy()
  original[1::2] = 1 - blended[1::2]
  images = rng.normal(size=original.shape).astype(np.float32)
  targets = rng.dirichlet(np.ones(4), 32).astype(np.float32)
  got = _blend(
    jnp.asarray(images),
    jnp.asarray(targets),
    jnp.arange(32),
    jax.random.key(0),
    mixup=mixup,
    cutmix=cutmix,
  )
  partner = np.arange(32) ^ 1
  want = original * images + (1 - original) * images[partner]
  share = shares[np.arange(32), np.arange(32) % 2][:, None]
  # A few float32 roundings of numbers up to 4.
  np.testing.assert_allclose(got[0], want, atol=2e-6)
  np.testing.assert_allclose(got[1], share * targets + (1 - share) * targets[partner], atol=1e-6)


@pytest.mark.parametrize('alpha', [0.2, pytest.param(3.0, marks=pytest.mark.slow)])
def test_mixup_draws_from_beta(alpha):
  images, targets = _shares(3000, alpha, 0.0, height=1, width=2)
  share = targets[::2, 0]
  np.testing.assert_array_equal(images[::2, 0, 0], images[::2, 0, 1])
  # Five standard deviations of the mean; variance 1 / (4 (2 alpha + 1)).
  deviation = np.sqrt(1 / (4 * (2 * alpha + 1)) / 3000)
  assert abs(share.mean() - 0.5) < 5 * deviation
  assert stats.kstest(share, stats.beta(alpha, alpha).cdf).pvalue > 1e-4
  after = np.corrcoef(share[1:], share[:-1])[0, 1]
  assert abs(after) < 5 / np.sqrt(3000)


def test_cutmix_cuts_one_rectangle():
  images, targets = _shares(3000, 0.0, 1.0, height=18, width=24)
  centres = []
  for original, share in zip(images[:800:2, :, :, 0], targets[:800:2, 0]):
    assert set(np.unique(original)) <= {0, 1}
    rows, columns = (original == 0).any(1), (original == 0).any(0)
    np.testing.assert_array_equal(original == 0, rows[:, None] & columns[None])
    for line in (rows, columns):  # without a gap
      assert (np.diff(np.flatnonzero(line)) == 1).all()
    if rows.any():
      centres.append([np.flatnonzero(x).mean() for x in (rows, columns)])
    # A count out of 432, divided: half a unit of float32.
    np.testing.assert_allclose(share, original.mean(), rtol=2**-23)
  # All over the image: both ends and the middle.
  low, high = np.quantile(centres, [0.05, 0.95], axis=0) / [17, 23]
  assert (low < 0.25).all() and (high > 0.75).all()


def test_cutmix_cuts_what_the_paper_cuts():
  _, targets = _shares(3000, 0.0, 1.0, height=18, width=24)
  # With lambda uniform a side is s = sqrt(1 - lambda) of the image's and, its
  # centre anywhere, s - s^2 / 4 of it is inside on average; both sides of it,
  # with s^2 uniform: 1/2 - 1/5 + 1/48.
  cut = 1 - targets[::2, 0]
  assert abs(cut.mean() - (1 / 2 - 1 / 5 + 1 / 48)) < 5 * 0.28 / np.sqrt(3000)


def test_both_set_a_fair_coin():
  # As many pairs and pixels as above, so that nothing is compiled for them.
  images, _ = _shares(1000, 0.4, 1.0)
  share = images[::2, :, :, 0].reshape(1000, 30)
  mixed = (share == share[:, :1]).all(1) & (share[:, 0] % 1 != 0)
  # Five standard deviations of a binomial share of 1000.
  assert abs(mixed.mean() - 0.5) < 5 * 0.5 / np.sqrt(1000)
  assert np.isin(share[~mixed], (0, 1)).all()


@pytest.mark.slow
def test_result_does_not_depend_on_who_holds_which_rows():
  rng = np.random.default_rng(0)
  images = jnp.asarray(rng.normal(size=(16, 6, 5, 3)), jnp.float32)
  targets = jnp.asarray(np.eye(4)[rng.integers(0, 4, 16)], jnp.float32)
  key = jax.random.key(3)

  def run(rows):
    return _blend(images[rows], targets[rows], rows, key, mixup=0.4, cutmix=1.0)

  together = run(jnp.arange(16))
  for parts in (2, 4):
    split = [run(rows) for rows in jnp.split(jnp.arange(16), parts)]
    for i in range(2):
      np.testing.assert_array_equal(np.concatenate([s[i] for s in split]), together[i])


def test_every_step_is_blended_anew():
  first, second = (_shares(1000, 0.4, 1.0, seed)[1] for seed in (0, 1))
  # Two rectangles may have one area by chance, of the 30 that there are.
  assert (first != second).any(1).mean() > 0.9
