"""`python -m safer_tta.cli`."""

from . import main

main()
