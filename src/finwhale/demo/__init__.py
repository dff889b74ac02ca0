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

V41_PATH = DEMO_PATH.with_name("demo_v41")
"""The directory of a DeepSeek-V4.1 of 2 MB with random weights, which tools/demo_v41.py wrote."""

EMBEDDED = {"demo-dspark": DSPARK_PATH, "demo-v41": V41_PATH}
"""Names that may stand for a checkpoint's path, and the directories that they mean."""
