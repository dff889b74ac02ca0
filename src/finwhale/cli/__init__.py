"""The command line. The only reader of environment variables."""
