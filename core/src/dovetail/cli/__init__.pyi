from . import render as render
