"""One thin module for each command; `run(arguments) -> exit code`. Imported by the CLI only when called."""
