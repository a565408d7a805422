"""`python -m dovetail`: the `dovetail` command."""

from dovetail.cli.main import main

if __name__ == "__main__":
    main(prog_name="python -m dovetail")
