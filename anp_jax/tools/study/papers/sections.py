"""The papers' sections by name."""

from anp_jax.tools.study.papers import anp2017, invariant2016, others, ring2015, uneven2017

BY_NAME = {
  'anp2017': anp2017.section,
  'uneven2017': uneven2017.section,
  'invariant2016': invariant2016.section,
  'ring2015': ring2015.section,
  'others': others.section,
}
