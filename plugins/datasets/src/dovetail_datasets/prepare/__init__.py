"""`dovetail data prepare`: converts public datasets to rows that train, by recipes."""
