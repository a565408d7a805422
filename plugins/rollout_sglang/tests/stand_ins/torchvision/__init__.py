"""Stands in for torchvision, whose builds for CUDA do not load beside a torch for CPUs: no image is looked at here."""

from anything import stand_in

__version__ = "0.0.0"
stand_in(__name__)
