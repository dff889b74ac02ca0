"""One table of operators a platform."""
