"""The keys of config.data: examples, how images are read, cut and mixed."""

import ml_collections

from anp_jax.config import trust
from anp_jax.config.keys import CLASS, flag, integer, number, numbers, share, text, value

# TensorFlow decodes images of no more than 2 ** 29 bytes of three channels.
MOST_MEGAPIXELS = 178.9

# Sources of image files that are listed with their classes.
LISTED = ('folder', 'list:*', 'tar:*', 'hf:*')
SOURCES = (
  'anp_shapes',
  'folder',
  'list:FILE',
  'tar:PATTERN',
  'hf:PATH',
  'tfds:NAME',
  'arrays',
  'features:FILE',
  'digits',
  'synthetic',
)
STREAM = 2  # raised where a run of the same config would see other images
FEATURES = 'features:'  # before files of features
WORDS = ('adjectives', 'nouns')  # of pairs
_STRONG = ('strong_crop', 'strong_scale', 'strong_pad')
KEYS = {
  'source': text(
    'anp_shapes',
    'data set; see docs/data.md; tfds:NAME was prepared by `tfds build NAME`',
    SOURCES,
    rf'tfds:\S+|(list|tar|hf|features):.+|{trust.SOURCE}',
    CLASS,
  ),
  'dir': text('', "folder of built data sets; '': $ANP_DATA, else a cache folder", resumable=True),
  'path': text(
    '',
    'folder or file of the images; for list:, tar: and hf: the base of relative paths; '
    'for a class of yours what it defines',
    only_if=('data.source', (*LISTED, 'arrays', '*.*:*')),
    resumable=True,
  ),
  'lists': text(
    '',
    "files of class ids by line: 'ANPS.txt[,ADJECTIVES.txt,NOUNS.txt]'",
    only_if=('data.source', LISTED),
    resumable=True,
  ),
  # The classes themselves are compared when a run is resumed.
  'pairs': text(
    'auto',
    'whether classes are adjective_noun pairs; auto: if parts recur; adjectives, nouns: '
    'yes, and examples are classified by that word alone',
    ('auto', 'yes', 'no', *WORDS),
    resumable=True,
  ),
  'widths': value(
    (),
    'numbers per example in each file of features; found in the files',
    lambda widths: all(type(w) is int and w > 0 for w in widths),
    'whole numbers above 0',
    only_if=('data.source', (f'{FEATURES}*',)),
  ),
  'train_split': text('train', 'training split; for folder also a split file (.txt)'),
  'eval_split': text(
    'validation', 'evaluation split; for folder also a split file (.txt)', resumable=True
  ),
  'stream': integer(
    STREAM,
    'version of the order, cuts and augmentations that this code draws from the seed; a run '
    'of another one is evaluated, but not continued',
    above=0,
  ),
  'image_size': integer(64, 'input side of the network in pixels', above=0),
  'resize': integer(72, 'shorter side in pixels before the centre crop of evaluation', above=0),
  'augment': text(
    'crop',
    'training crop; crop: random area and aspect; scale: random shorter side; pad: '
    'shift by up to an eighth of image_size, black outside; strong_*: RandAugment and '
    'random erasing after it',
    ('crop', 'scale', 'pad', 'none', *_STRONG),
  ),
  'crop_area': numbers(
    (0.35, 1.0),
    "range of the crop's share of the image area",
    above=0,
    at_most=1,
    increasing=True,
    only_if=('data.augment', ('crop', 'strong_crop')),
  ),
  'crop_ratio': numbers(
    (0.75, 4 / 3),
    "range of the crop's aspect ratio, width over height",
    above=0,
    increasing=True,
    only_if=('data.augment', ('crop', 'strong_crop')),
  ),
  'scale_range': numbers(
    (256, 512),
    'range of the shorter side in pixels',
    above=0,
    increasing=True,
    only_if=('data.augment', ('scale', 'strong_scale')),
  ),
  'rand_augment_ops': integer(
    2,
    'RandAugment operations per image, each skipped with probability 0.5; 0: none',
    at_least=0,
    only_if=('data.augment', _STRONG),
  ),
  'rand_augment_magnitude': number(
    9, 'RandAugment magnitude', at_least=0, at_most=10, only_if=('data.augment', _STRONG)
  ),
  'erase': share(
    0.25,
    'random-erasing probability; 2 to 33 % of an image are erased',
    only_if=('data.augment', _STRONG),
  ),
  'flip': share(0.5, 'probability of a horizontal flip'),
  'mixup': number(0, 'mixup alpha; 0: none', at_least=0),
  'cutmix': number(
    0, 'CutMix alpha; with mixup too, each group of images uses one of them; 0: none', at_least=0
  ),
  'mean': numbers((123.68, 116.78, 103.94), 'RGB mean (0..255), subtracted on the device'),
  'std': numbers(
    (58.4, 57.1, 57.4), 'RGB standard deviation (0..255), divided by on the device', above=0
  ),
  'decode': text(
    'fast',
    'decoder; fast: large JPEGs at 1/2 to 1/8 scale, then the four nearest pixels, by OpenCV; '
    "exact: antialiased crops, by tf.data; bilinear, bicubic: Pillow's filter on the whole "
    'image, as in transformers',
    ('fast', 'exact', 'bilinear', 'bicubic'),
  ),
  'stretch': flag(
    False,
    'evaluation stretches an image to `resize` by `resize` pixels, as Caffe does, before its crop',
    only_if=('data.decode', ('bilinear', 'bicubic')),
  ),
  'cache': text(
    'none',
    'mapped: decoded images of `resize` pixels in files that the processes of a host map '
    'into memory',
    ('none', 'mapped'),
  ),
  'max_damaged': share(0.01, 'share of unreadable examples at which a run stops', resumable=True),
  'max_megapixels': number(
    MOST_MEGAPIXELS,
    'largest image in megapixels; a larger one counts as damaged',
    above=0,
    at_most=MOST_MEGAPIXELS,
  ),
  'prefetch': integer(2, 'batches prefetched to the device', above=0, resumable=True),
  'threads': integer(0, 'decoding threads; 0: one per core', at_least=0, resumable=True),
  'held_out': value(
    (),
    'pairs excluded from training',
    lambda names: all(isinstance(n, str) for n in names),
    "names of classes, as in ('red_car',)",
  ),
  'imbalance': number(
    1, 'ratio of the largest to the smallest class that training is cut to', at_least=1
  ),
  'balance': text(
    'none',
    'class balancing; sample: all classes equally often; weights: in the loss',
    ('none', 'sample', 'weights'),
  ),
  'balance_power': number(
    1,
    'exponent of the class sizes in the loss weights; 0.5: square root',
    above=0,
    at_most=1,
    only_if=('data.balance', ('weights',)),
  ),
  'synthetic_examples': integer(
    1280, 'examples per split', above=0, only_if=('data.source', ('synthetic',))
  ),
  'synthetic_classes': integer(
    1000, 'number of classes', above=0, only_if=('data.source', ('synthetic',))
  ),
}


def example(config: ml_collections.ConfigDict) -> tuple[tuple[int, int, int], str]:
  """Returns the shape and dtype of an example: an image, or features as one pixel."""
  d = config.data
  widths = d.get('widths', ())
  return ((1, 1, sum(widths)), 'float32') if widths else ((d.image_size, d.image_size, 3), 'uint8')
