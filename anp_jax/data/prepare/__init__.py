"""From a folder of images to a set: examined, repaired, in few files."""
