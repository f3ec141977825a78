"""`anp_folder/NAME`: a folder of images as a tensorflow-datasets set.

`python -m anp_jax.data.prepare` writes it. Neither writing nor reading it
imports TensorFlow.
"""

from collections.abc import Iterable
import os

from array_record.python import array_record_module
import tensorflow_datasets as tfds
from tensorflow_datasets.core import dataset_info, example_serializer

from anp_jax.data import vocabulary
from anp_jax.data.prepare import anp_folder_files

# One record a chunk, as tfds writes it: records are read one by one. Without
# compression: image files do not shrink, and writing takes a third of the time.
WRITER_OPTIONS = 'group_size:1,uncompressed'

_DESCRIPTION = """\
Images of a folder, in the order of their list and with the bytes of their
files. What was left out, converted or reduced is in report.md and damaged.jsonl."""


def features(classes: vocabulary.Vocabulary) -> tfds.features.FeaturesDict:
  """Returns the features of a set with these classes.

  `image`, the bytes of a file, uint8 RGB of any size; `label`; `file_name`,
  relative to the folder of its split; and, where every class is an
  adjective-noun pair, `adjective` and `noun`. Ids are int64.
  """
  label = tfds.features.ClassLabel
  result = {
    'image': tfds.features.Image(shape=(None, None, 3)),
    'label': label(names=classes.names),
    'file_name': tfds.features.Text(),
  }
  result |= {name: label(names=words) for name, words, _ in classes.factors}
  return tfds.features.FeaturesDict(result)


def write_shard(
  path: str, classes: vocabulary.Vocabulary, examples: Iterable[tuple[bytes, int, str]]
) -> None:
  """Writes an ArrayRecord file.

  Args:
    path: file to write; a reader may see it half written.
    classes: classes of the set.
    examples: bytes, label and name of each image file.
  """
  encoder = features(classes)
  serializer = example_serializer.ExampleSerializer(encoder.get_serialized_info())
  writer = array_record_module.ArrayRecordWriter(path, WRITER_OPTIONS)
  try:
    for image, label, file_name in examples:
      # Names need not be UTF-8, and tfds takes bytes for what they are.
      example = {'image': image, 'label': label, 'file_name': os.fsencode(file_name)}
      example |= {name: int(ids[label]) for name, _, ids in classes.factors}
      proto = serializer.get_tf_example(encoder.encode_example(example))
      # Else the features' order changes from process to process.
      writer.write(proto.SerializeToString(deterministic=True))
  finally:
    writer.close()


def write_info(
  folder: str, name: str, classes: vocabulary.Vocabulary, splits: dict[str, list], metadata: dict
) -> None:
  """Writes dataset_info.json, features.json and the other files tfds reads.

  Args:
    folder: folder of the shards.
    name: name of the set.
    classes: classes of the set.
    splits: number of examples of each shard, by split.
    metadata: content of metadata.json.
  """
  identity = dataset_info.DatasetIdentity(
    name=anp_folder_files.NAME,
    version=tfds.core.Version(anp_folder_files.VERSION),
    data_dir=folder,
    module_name=__name__,
    config_name=name,
  )
  info = tfds.core.DatasetInfo(
    builder=identity,
    description=_DESCRIPTION,
    features=features(classes),
    supervised_keys=('image', 'label'),
    metadata=tfds.core.MetadataDict(metadata),
  )
  info.set_file_format('array_record')
  info.set_splits(tfds.core.SplitDict([_split_info(folder, *item) for item in splits.items()]))
  info.write_to_directory(folder)


def _split_info(folder, split, lengths):
  template = tfds.core.ShardedFileTemplate(
    data_dir=folder, dataset_name=anp_folder_files.NAME, split=split, filetype_suffix='array_record'
  )
  size = sum(os.path.getsize(path) for path in template.sharded_filepaths(len(lengths)))
  return tfds.core.SplitInfo(
    name=split, shard_lengths=lengths, num_bytes=size, filename_template=template
  )
