"""`python -m fsdp_migrate` is the console script `fsdp-migrate`."""

from fsdp_migrate.cli import main

main()
