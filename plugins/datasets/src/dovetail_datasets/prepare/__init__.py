"""`dovetail data prepare`: public datasets as rows, by recipes."""
