"""The keys of config.data: examples, how images are read, cut and mixed."""

from anp_jax.config import trust
from anp_jax.config.keys import CLASS, integer, number, numbers, text, value

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
  'digits',
  'synthetic',
)
_STRONG = ('strong_crop', 'strong_scale', 'strong_pad')
KEYS = {
  'source': text(
    'anp_shapes',
    'data set, see docs/data.md; tfds:NAME is what `tfds build NAME` prepared',
    SOURCES,
    rf'tfds:\S+|(list|tar|hf):.+|{trust.SOURCE}',
    CLASS,
  ),
  'dir': text('', "where sets are built; '': $ANP_DATA, else a cache folder", resumable=True),
  'path': text(
    '',
    'folder or file of the images; of list:, tar: and hf:, the folder '
    'that relative paths start from; what a class of your own makes of it',
    only_if=('data.source', (*LISTED, 'arrays', '*.*:*')),
    resumable=True,
  ),
  'lists': text(
    '',
    "'ANPS.txt[,ADJECTIVES.txt,NOUNS.txt]': class ids by line",
    only_if=('data.source', LISTED),
    resumable=True,
  ),
  # The classes themselves are compared when a run is resumed.
  'pairs': text(
    'auto',
    'whether classes are adjective_noun; auto: if parts recur',
    ('auto', 'yes', 'no'),
    resumable=True,
  ),
  'train_split': text('train', 'or, for folder, a split file (.txt)'),
  'eval_split': text('validation', 'or, for folder, a split file (.txt)', resumable=True),
  'image_size': integer(64, 'pixels a side that the network sees', above=0),
  'resize': integer(72, 'pixels of the shorter side before the crop in evaluation', above=0),
  'augment': text(
    'crop',
    'crop: random area and aspect; scale: random shorter side; pad: '
    'moved by up to an eighth of image_size, black beyond; strong_crop and the '
    'like: RandAugment and random erasing follow',
    ('crop', 'scale', 'pad', 'none', *_STRONG),
  ),
  'crop_area': numbers(
    (0.35, 1.0),
    'shares of the image',
    above=0,
    at_most=1,
    increasing=True,
    expected='shares of the image, at most 1',
    only_if=('data.augment', ('crop', 'strong_crop')),
  ),
  'crop_ratio': numbers(
    (0.75, 4 / 3),
    'width over height',
    above=0,
    increasing=True,
    only_if=('data.augment', ('crop', 'strong_crop')),
  ),
  'scale_range': numbers(
    (256, 512),
    'pixels of the shorter side',
    above=0,
    increasing=True,
    only_if=('data.augment', ('scale', 'strong_scale')),
  ),
  'rand_augment_ops': integer(
    2,
    'operations of RandAugment on an image, each left out in half of the cases; 0: none',
    at_least=0,
    only_if=('data.augment', _STRONG),
  ),
  'rand_augment_magnitude': number(
    9, 'of these operations', at_least=0, at_most=10, only_if=('data.augment', _STRONG)
  ),
  'erase': number(
    0.25,
    'probability that 2 to 33 % of an image are painted over',
    at_least=0,
    at_most=1,
    only_if=('data.augment', _STRONG),
  ),
  'flip': number(0.5, 'probability of a horizontal flip', at_least=0, at_most=1),
  'mixup': number(0, 'alpha of the Beta distribution; 0: none', at_least=0),
  'cutmix': number(0, 'alpha; with both, each group of images takes one of them', at_least=0),
  'mean': numbers((123.68, 116.78, 103.94), 'RGB, 0..255, subtracted on the device'),
  'std': numbers((58.4, 57.1, 57.4), 'RGB, 0..255, divided by on the device', above=0),
  'decode': text(
    'fast',
    'fast: large JPEG crops at 1/2 to 1/8, area mean; exact: '
    "antialiased crops; bilinear, bicubic: the whole image by Pillow's "
    'filter, as in transformers',
    ('fast', 'exact', 'bilinear', 'bicubic'),
  ),
  'cache': text(
    'none',
    'in memory: encoded files, or decoded images of `resize` pixels',
    ('none', 'encoded', 'decoded'),
  ),
  'cache_gigabytes': number(
    4,
    'that the cache of each split and process may take',
    at_least=0,
    only_if=('data.cache', ('encoded', 'decoded')),
    resumable=True,
  ),
  'max_damaged': number(
    0.01, 'share of unreadable examples at which a run stops', at_least=0, at_most=1, resumable=True
  ),
  'max_megapixels': number(
    MOST_MEGAPIXELS,
    'million pixels of an image; a larger one counts as damaged',
    above=0,
    at_most=MOST_MEGAPIXELS,
  ),
  'prefetch': integer(2, 'batches that wait on the device', above=0, resumable=True),
  'threads': integer(0, 'decoding threads; 0: as many as cores', at_least=0, resumable=True),
  'held_out': value(
    (),
    'pairs that training shows no example of',
    lambda names: all(isinstance(n, str) for n in names),
    "names of classes, as in ('red_car',)",
  ),
  'imbalance': number(1, 'largest class over smallest that training is cut to', at_least=1),
  'balance': text(
    'none', 'sample: all classes equally often; weights: of the loss', ('none', 'sample', 'weights')
  ),
  'balance_power': number(
    1,
    "of the classes' sizes in the weights of the loss; 0.5: the root",
    above=0,
    at_most=1,
    only_if=('data.balance', ('weights',)),
  ),
  'synthetic_examples': integer(
    1280, 'examples of a split', above=0, only_if=('data.source', ('synthetic',))
  ),
  'synthetic_classes': integer(1000, 'classes', above=0, only_if=('data.source', ('synthetic',))),
}
