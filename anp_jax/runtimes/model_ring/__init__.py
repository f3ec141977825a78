"""Many models in a ring of devices: the models travel, the data never do.

After Chen, Lee, Xia, Lin, Suzumura and Lin (ISM 2015). Each station, a device
or a host, has one shard of the training set; a model trains on a shard at a
time, then its whole state moves on to the next station. A model sees each shard
once a lap, which is an epoch, and ends bit for bit as if it had been alone.

There is no clock: a station takes what arrives in the order in which it
arrives, and the controller decides which models enter. `worker` tells what
happens to a model in one lap.
"""
