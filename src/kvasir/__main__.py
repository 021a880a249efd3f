"""`python -m kvasir`: the command `kvasir`."""

from kvasir.cli.main import main

main()
