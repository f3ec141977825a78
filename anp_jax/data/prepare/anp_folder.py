"""`anp_folder/NAME`: a folder of images as a tensorflow-datasets set.

`python -m anp_jax.data.prepare` writes it. Neither writing nor reading it
imports TensorFlow.
"""

from collections.abc import Iterable
import dataclasses
import os

from absl import logging
from array_record.python import array_record_module
import tensorflow_datasets as tfds
from tensorflow_datasets.core import example_serializer

from anp_jax.data import vocabulary
from anp_jax.data.prepare import anp_folder_files

# One record a chunk, as tfds writes it: records are read one by one. Without
# compression: image files do not shrink, and writing takes a third of the time.
WRITER_OPTIONS = 'group_size:1,uncompressed'

_DESCRIPTION = """\
Images of a folder, in the order of their list and with the bytes of their
files. What was left out or converted is in report.md and damaged.jsonl."""


@dataclasses.dataclass(eq=False)
class Config(tfds.core.BuilderConfig):
  """The config of one set: name, classes and content of `metadata.json`."""

  classes: vocabulary.Vocabulary | None = None
  metadata: dict = dataclasses.field(default_factory=dict)


class AnpFolder(tfds.core.GeneratorBasedBuilder):
  """The builder of `anp_folder/NAME`; `tfds.data_source` reads it without.

  Features: `image`, the bytes of a file, uint8 RGB of any size; `label`;
  `file_name`, relative to the folder of its split; and, where every class is an
  adjective-noun pair, `adjective` and `noun`. Ids are int64.
  """

  VERSION = tfds.core.Version(anp_folder_files.VERSION)
  RELEASE_NOTES = {anp_folder_files.VERSION: 'First version.'}
  url_infos = None  # nothing is downloaded

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      description=_DESCRIPTION,
      features=features(self.builder_config.classes),
      supervised_keys=('image', 'label'),
      metadata=tfds.core.MetadataDict(self.builder_config.metadata),
    )

  def _split_generators(self, dl_manager):
    raise NotImplementedError('Run python -m anp_jax.data.prepare.')

  def _generate_examples(self):
    raise NotImplementedError


def features(classes: vocabulary.Vocabulary) -> tfds.features.FeaturesDict:
  """Returns the features of a set with these classes; see `AnpFolder`."""
  label = tfds.features.ClassLabel
  result = {
    'image': tfds.features.Image(shape=(None, None, 3)),
    'label': label(names=classes.names),
    'file_name': tfds.features.Text(),
  }
  if classes.is_anp:
    result['adjective'] = label(names=classes.adjectives)
    result['noun'] = label(names=classes.nouns)
  return tfds.features.FeaturesDict(result)


def write_shard(
  path: str, classes: vocabulary.Vocabulary, examples: Iterable[tuple[bytes, int, str]]
) -> int:
  """Writes an ArrayRecord file.

  Args:
    path: of the file, which a reader may see half written.
    classes: of the set.
    examples: the bytes of an image file, its label and its name.

  Returns:
    The size of all serialized examples in bytes.
  """
  encoder = features(classes)
  serializer = example_serializer.ExampleSerializer(encoder.get_serialized_info())
  adjectives, nouns = classes.adjective_ids(), classes.noun_ids()
  total = 0
  writer = array_record_module.ArrayRecordWriter(path, WRITER_OPTIONS)
  try:
    for image, label, file_name in examples:
      # Names need not be UTF-8, and tfds takes bytes for what they are.
      example = {'image': image, 'label': label, 'file_name': os.fsencode(file_name)}
      if classes.is_anp:
        example['adjective'] = int(adjectives[label])
        example['noun'] = int(nouns[label])
      proto = serializer.get_tf_example(encoder.encode_example(example))
      # Else the features' order changes from process to process.
      record = proto.SerializeToString(deterministic=True)
      total += len(record)
      writer.write(record)
  finally:
    writer.close()
  return total


def write_info(
  folder: str,
  name: str,
  classes: vocabulary.Vocabulary,
  splits: dict[str, tuple[list[int], int]],
  metadata: dict,
) -> None:
  """Writes dataset_info.json, features.json and the other files tfds reads.

  Args:
    folder: of the shards.
    name: of the set.
    classes: of the set.
    splits: by name, the number of examples of each shard, and the size of all
      serialized examples in bytes.
    metadata: for metadata.json.
  """
  config = Config(name=name, version=AnpFolder.VERSION, classes=classes, metadata=metadata)
  before = logging.get_verbosity()
  logging.set_verbosity(logging.ERROR)  # it would warn of a config of our own
  try:
    builder = AnpFolder(config=config, data_dir=folder, file_format='array_record')
    infos = [
      tfds.core.SplitInfo(
        name=split,
        shard_lengths=lengths,
        num_bytes=size,
        filename_template=tfds.core.ShardedFileTemplate(
          data_dir=folder,
          dataset_name=anp_folder_files.NAME,
          split=split,
          filetype_suffix='array_record',
        ),
      )
      for split, (lengths, size) in splits.items()
    ]
    builder.info.set_splits(tfds.core.SplitDict(infos))
    builder.info.write_to_directory(folder)
  finally:
    logging.set_verbosity(before)
