"""Many models in a ring of devices: the models travel, the data never do.

After Chen, Lee, Xia, Lin, Suzumura and Lin (ISM 2015). Each station, a device
or a host, holds one part of the training set; a model trains on a part at a
time, then its whole state moves on to the next station. A model sees each part
once a lap, which is an epoch, and ends bit for bit as if it had been alone.

Nobody keeps time: a station takes what comes in the order in which it comes,
and the first one decides what enters.
"""
