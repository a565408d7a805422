"""`dovetail plugins check`: an installed plugin's class, facts and conformance suite, run in a process of its own."""
