"""Reads images and prepares them for vision-language models."""
