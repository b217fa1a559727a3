"""The tables of recorded runs: a module for what is measured together; `python -m scripts.figures` prints them."""
