"""What files written for verl import from it, and its dataset classes as a dataset of Dovetail."""
