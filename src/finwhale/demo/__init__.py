"""The embedded demo model: a small DeepSeek-V4 in the official layout, trained by this project.

examples/train_demo/ made it; NOTICE names the sources of its text.
"""

from pathlib import Path

DEMO_PATH = Path(__file__).parent
"""The checkpoint's directory."""
