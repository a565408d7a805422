"""The data flow of a run: the plan, its parts, the stages and the loop. Private to core."""
