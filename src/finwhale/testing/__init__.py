"""Support for tests and benchmarks. The engine never imports it."""
