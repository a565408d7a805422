"""`dovetail data look` and `dovetail data check`: rows of a dataset as the model sees them, and what is wrong with them."""
