"""The embedded model: a small DeepSeek-V4 in the official layout, trained by this project.

It has two forms, which share the file of the model's own tensors: one with an MTP layer, as the
checkpoints of April have, and one with a DSpark head, as V4-Flash-0731 has. examples/train_demo/
made both; NOTICE names the sources of the text.
"""

from pathlib import Path

DEMO_PATH = Path(__file__).parent
"""The directory of the form with an MTP layer."""

DSPARK_PATH = DEMO_PATH.with_name("demo_dspark")
"""The directory of the form with a DSpark head."""

DSPARK_NAME = "demo-dspark"
"""Names the form with a DSpark head wherever a checkpoint's path may stand."""
