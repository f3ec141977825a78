"""Names of the networks that config.model.name chooses, by family."""


def _names(text: str) -> tuple[str, ...]:
  return tuple(text.split())


RESNETS = _names("""
  resnet18 resnet34 resnet50 resnet101 resnet152
  resnet20 resnet32 resnet56
  resnet18d resnet34d resnet50d resnet101d resnet152d
  seresnet18 seresnet34 seresnet50 seresnet101 seresnet152
  resnext50_32x4d resnext101_32x4d resnext101_32x8d resnext101_64x4d
  seresnext50_32x4d seresnext101_32x4d seresnext101_32x8d
  wide_resnet50_2 wide_resnet101_2
""")
CAFFENETS = ('caffenet', 'bvlc_alexnet')
CONVNETS = ('lenet', 'cifar10_full', 'two_convolutions', *CAFFENETS)
CONVNEXTS = _names("""
  convnext_tiny convnext_small convnext_base
  convnextv2_atto convnextv2_femto convnextv2_pico convnextv2_nano convnextv2_tiny convnextv2_base
""")
EFFICIENTNETS = _names("""
  efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4
  efficientnetv2_s
  tf_efficientnet_b0 tf_efficientnet_b1 tf_efficientnet_b2 tf_efficientnet_b3 tf_efficientnet_b4
  tf_efficientnetv2_s
  tf_efficientnet_lite0 tf_efficientnet_lite1 tf_efficientnet_lite2
""")
BATCH_NORMALISED = (*RESNETS, *EFFICIENTNETS, 'airbench94', 'linear')
MODELS = (*BATCH_NORMALISED, *CONVNETS, *CONVNEXTS)
