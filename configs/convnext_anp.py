"""ConvNeXt with its own recipe: RandAugment, erasing, mixup, cutmix, EMA.

  python main.py --config=configs/convnext_anp.py --workdir=runs/convnext
    --config.data.source=folder --config.data.path=DIR

trains ConvNeXt-T from random weights on the photographs in DIR, at 224 px, by
the recipe of Liu et al. 2022 (arXiv 2201.03545, appendix A). Their 4,096 images
a step at a rate of 4e-3 are 1,024 at 1e-3 here; for another batch size, scale
the rate in proportion. Their top-1 on ImageNet is 82.1 %, after 300 epochs. On
a few thousand photographs begin with weights instead. Variants, as in
--config=configs/convnext_anp.py:finetune

  finetune   from published weights, by the paper's recipe for weights of
             ImageNet-22K (82.9 % on ImageNet with ConvNeXt-T)
  tiny       four steps on handwritten digits, most of whose time is compiling;
             for tests

finetune loads the weights of the folder convnext_tiny in the current folder.
Fetch them on a computer with a network:

  from huggingface_hub import snapshot_download
  snapshot_download('timm/convnext_tiny.fb_in22k', local_dir='convnext_tiny')

or with --config.init.from=FILE, a .safetensors file or a run of your own.
--config.model.name names another size; the paper's drop_path from random
weights is 0.1 (tiny), 0.4 (small), 0.5 (base), in fine-tuning 0, 0.1, 0.2.

Different from the paper's: what is erased gets the mean colour, not noise; the
decay of rates is by block, 0.93, not 0.8 for every three blocks; the new head
of fine-tuning begins as in training, not a thousand times smaller; images are
resampled by config.data.decode=fast (bicubic is theirs). Neither recipe has
been run for its whole length here.
"""

from anp_jax import config as config_lib

VARIANTS = {
  'finetune': {
    'batch_size': 512,
    'duration': '30 epochs',
    'ema': 0.0,
    'init.from': 'convnext_tiny',
    'model.drop_path': 0.0,
    'data.mixup': 0.0,
    'data.cutmix': 0.0,
    'optimizer.learning_rate': 5e-5,
    'optimizer.weight_decay': 1e-8,
    'optimizer.layer_decay': 0.93,  # 0.8 for every three blocks
    'schedule.warmup': '0 steps',
  },
  'tiny': {
    'batch_size': 16,
    'duration': '4 steps',
    'model.name': 'convnextv2_atto',
    'model.dtype': 'float32',
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
  """The paper's recipe from random weights, or one of VARIANTS."""
  c = config_lib.base()
  c.batch_size = 1024
  c.duration = '300 epochs'
  c.label_smoothing = 0.1
  c.ema = 0.9999
  c.model.name = 'convnext_tiny'
  c.model.dtype = 'auto'
  c.model.drop_path = 0.1
  c.data.image_size = 224
  c.data.resize = 256
  c.data.augment = 'strong_crop'
  c.data.crop_area = (0.08, 1.0)
  c.data.rand_augment_ops = 2
  c.data.rand_augment_magnitude = 9.0
  c.data.erase = 0.25
  c.data.mixup = 0.8
  c.data.cutmix = 1.0
  c.data.mean = (123.675, 116.28, 103.53)  # of ImageNet, as in timm
  c.data.std = (58.395, 57.12, 57.375)
  c.optimizer.name = 'adamw'
  c.optimizer.learning_rate = 1e-3  # 4e-3 for 4,096 images
  c.optimizer.weight_decay = 0.05
  c.schedule.warmup = '20 epochs'
  c.log.every = '100 steps'
  c.update_from_flattened_dict(config_lib.variant(variant, VARIANTS))
  return c
