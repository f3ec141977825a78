"""Channel split: each device computes some of the channels of convolutions.

The method of Marques, Falcao and Alexandre (arXiv 1712.02546), for devices of
unequal speed. They lie along the mesh's axis 'model'. Each has the same images and
weights and computes its share of each convolution's features, and all other layers
in full.
"""
