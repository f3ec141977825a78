"""Channel split: each device computes some of the channels of convolutions.

After Marques, Falcao and Alexandre (arXiv 1712.02546), for devices of unequal
speed. They lie along the mesh's axis 'model'; each has the same images and
weights, computes its share of each convolution's features, and everything else
in full.
"""
