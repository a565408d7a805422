"""Stand-in for torchvision, whose CUDA builds do not load with a CPU build of torch; the tests use no images."""

from anything import stand_in

__version__ = "0.0.0"
stand_in(__name__)
